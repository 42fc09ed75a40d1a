"""docs/troubleshooting.md in English and Chinese, from the catalogue. `python -m server.diagnosis.page` writes both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from server.diagnosis.catalogue import CATALOGUE, DOCS, EXIT_CODES, Entry, Kind, load_catalogue

PAGE = Path(__file__).parents[2] / DOCS
CHINESE_PAGE = PAGE.with_suffix(".zh.md")
CHINESE_TEXTS = CATALOGUE.with_suffix(".zh.yaml")

_HEAD = """\
# Troubleshooting

[中文](troubleshooting.zh.md)

When the engine ends, voltserve compares its last lines and the way it ended with a catalogue of known failures. The
diagnosis is in the log and in `/health` under `diagnosis`. If `voltserve serve` ends while the engine is down, its exit
code says it, too. `voltserve doctor` finds many of these causes before a start. `voltserve plan DIR` finds those that
are a matter of memory. The first entry below that matches is the diagnosis.

A start that fails is tried again after 1, 2, 4 … 60 s, five times at most. Where another start would end the same, it
is not: `voltserve serve` then ends at once with the exit code, or goes on while another engine of `--engines` may work.
An engine that has worked is always started again.

Compose's `restart: unless-stopped` starts the container again whatever the exit code, with up to a minute between two
starts. `docker compose ps` then shows `Restarting (65)`, the container's log the diagnosis; `docker compose stop` ends
it. In a systemd unit, `RestartPreventExitStatus=2 65 78` keeps such a failure from being repeated.

Once an engine serves, its log may repeat what clients wrote. So `/health` and the diagnosis of a later failure rest on
how its processes ended, and on their reports apart from the log. An exception's message stays in the log.

What is known to fail before anything starts ends `serve`, `explain`, `plan` and `verify` alike with one message and one
exit code. The code is 65 for a model directory that is damaged or cannot be served on these devices. It is 2 for a
flag, the cards, or the memory. Another start ends the same way until what the message names is changed.

This page is made from `configs/errors.yaml` by `python -m server.diagnosis.page`; change that file, not this one.

| exit code | kind |
|---|---|
"""
_CHINESE_HEAD = """\
# 故障排除

[English](troubleshooting.md)

引擎结束时，voltserve 会把它最后的输出和结束方式与一份已知故障的目录比对。诊断写在日志中，
以及 `/health` 的 `diagnosis` 里；如果 `voltserve serve` 在引擎停止时结束，退出码也会说明。
许多原因在启动之前就能用 `voltserve doctor` 发现，与显存有关的可用 `voltserve plan DIR` 发现。
下面第一个匹配的条目就是诊断。

启动失败后，会在 1、2、4 … 60 秒后重试，最多五次。如果再次启动结果也一样，就不再重试：
`voltserve serve` 会立即以该退出码结束；如果 `--engines` 中还有别的引擎可以工作，则继续运行。
曾经正常工作过的引擎总会重新启动。

Compose 的 `restart: unless-stopped` 不论退出码如何都会重新启动容器，两次启动之间最长间隔一分钟。
这时 `docker compose ps` 显示 `Restarting (65)`，容器日志中有诊断；`docker compose stop` 可以停止它。
在 systemd 单元中，`RestartPreventExitStatus=2 65 78` 可以避免重复这样的失败。

引擎开始服务之后，日志中可能出现客户端写的内容。
因此 `/health` 和之后的诊断只依据进程的结束方式和它们在日志之外的报告；异常的消息只留在日志中。

凡是启动之前就已知会失败的，`serve`、`explain`、`plan` 和 `verify` 都以同样的消息和退出码结束。模型目录损坏，
或无法在这些设备上提供服务时，退出码是 65；与参数、显卡或显存有关时是 2。消息所指的内容改变之前，再次启动结果相同。

本页由 `python -m server.diagnosis.page` 根据 `configs/errors.yaml` 和 `configs/errors.zh.yaml` 生成；
请修改这些文件，不要修改本页。

| 退出码 | 类别 |
|---|---|
"""


@dataclass(frozen=True)
class Language:
    """The page's own words. `other_codes`: exit codes of commands, not of engines."""

    head: str
    other_codes: Mapping[int, str]
    kinds: Mapping[Kind, str]
    kind: str
    retried: str
    not_retried: str
    seen: str
    line: str
    end: str
    besides: str
    cause: str
    remedy: str


ENGLISH = Language(
    head=_HEAD,
    other_codes={
        2: "refused before the start: settings, cards, memory",
        69: "a hub, or the way to it ([models.md](models.md#when-a-fetch-fails))",
    },
    kinds={kind: kind for kind in EXIT_CODES},
    kind="Kind: ",
    retried="; tried again.",
    not_retried="; not tried again.",
    seen="Seen as:",
    line="a line with",
    end="an engine that ended so:",
    besides="and besides, a line with",
    cause="Cause: ",
    remedy="Remedy:",
)
CHINESE = Language(
    head=_CHINESE_HEAD,
    other_codes={
        2: "启动之前即被拒绝：设置、显卡、显存",
        69: "模型站点，或通往它的网络（[models.zh.md](models.zh.md#下载失败时)）",
    },
    kinds={
        "configuration": "配置",
        "model": "模型",
        "memory": "内存或显存",
        "gpu": "显卡",
        "communication": "通信",
        "environment": "环境",
        "timeout": "超时",
        "engine": "引擎",
    },
    kind="类别：",
    retried="；会重试。",
    not_retried="；不会重试。",
    seen="表现：",
    line="日志行含有",
    end="引擎这样结束：",
    besides="并且还有一行含有",
    cause="原因：",
    remedy="处理办法：",
)


def render(entries: Sequence[Entry], language: Language = ENGLISH) -> str:
    """The page's text."""
    codes = {**language.other_codes, **{code: language.kinds[kind] for kind, code in EXIT_CODES.items()}}
    rows = "".join(f"| {code} | {kind} |\n" for code, kind in sorted(codes.items()))
    return language.head + rows + "".join(_section(entry, language) for entry in entries)


def translated(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with the texts of configs/errors.zh.yaml."""
    texts = yaml.safe_load(CHINESE_TEXTS.read_text(encoding="utf-8"))
    return [entry.model_copy(update=texts[entry.id]) for entry in entries]


def _section(entry: Entry, words: Language) -> str:
    seen = [f"- {words.line} `{pattern}`" for pattern in entry.lines]
    if entry.exit:
        seen.append(f"- {words.end} `{entry.exit}`")
    if entry.also:
        seen.append(f"- {words.besides} `{entry.also}`")
    lines = [
        f'\n## <a id="{entry.id}"></a>{entry.id}: {entry.title}\n',
        f"{words.kind}{words.kinds[entry.kind]}{words.retried if entry.retried else words.not_retried}\n",
        f"{words.seen}\n",
        *seen,
        f"\n{words.cause}{entry.cause}\n",
        f"{words.remedy}\n",
        *(f"- {step}" for step in entry.remedy),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    catalogue = load_catalogue()
    PAGE.write_text(render(catalogue), encoding="utf-8")
    CHINESE_PAGE.write_text(render(translated(catalogue), CHINESE), encoding="utf-8")
