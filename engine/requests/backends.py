"""vLLM's grammar backends by name, and queries of a compiled grammar that vLLM's interface lacks."""

from typing import Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

_CLASSES = {
    "xgrammar": "vllm.v1.structured_output.backend_xgrammar.XgrammarBackend",
    "guidance": "vllm.v1.structured_output.backend_guidance.GuidanceBackend",
    "outlines": "vllm.v1.structured_output.backend_outlines.OutlinesBackend",
    "lm-format-enforcer": "vllm.v1.structured_output.backend_lm_format_enforcer.LMFormatEnforcerBackend",
}


def make(name: str, config: VllmConfig, tokenizer: Any) -> StructuredOutputBackend:
    """The backend `name` for the model of `config`."""
    backend = resolve_obj_by_qualname(_CLASSES[name])
    made: StructuredOutputBackend = backend(
        config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size()
    )
    return made


def check(grammar: StructuredOutputGrammar) -> None:
    """Raises ValueError if guidance could not compile `grammar`. guidance reports that only when asked."""
    matcher = getattr(grammar, "ll_matcher", None)
    error = matcher.get_error() if matcher is not None else ""
    if error:
        raise ValueError(error)


def over(grammar: StructuredOutputGrammar) -> bool:
    """Whether `grammar` is at its end. xgrammar and outlines then accept no token. Changes nothing."""
    guide = getattr(grammar, "guide", None)
    if guide is not None:
        return bool(guide.is_finished())
    return bool(getattr(grammar, "_is_terminated", False) or getattr(grammar, "terminated", False))
