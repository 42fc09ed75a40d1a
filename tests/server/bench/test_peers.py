from pathlib import Path

import pytest

from server.bench.peers import load_peers
from server.errors import ConfigError


def test_the_reference_documents_table_and_at_least_five_peers_are_there() -> None:
    found = load_peers()
    assert found.reference.tokens_per_s == {1: 18, 8: 95, 16: 130, 32: 140}
    assert len(found.peers) >= 5
    assert all(rate > 0 for peer in found.peers for rate in peer.tokens_per_s.values())


def test_a_file_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    path.write_text(
        "schema: 1\nreference: {title: t, tokens_per_s: {1: 1}, ttft_ms: [1, 2], note: n}\npeers: []\nmore: 1\n"
    )
    with pytest.raises(ConfigError, match=r"(?s)peers\.yaml.*more"):
        load_peers(path)
