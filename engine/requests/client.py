"""vLLM's client of the engine process. It checks each request first, and fails it alone if its output fails."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.entrypoints.openai.engine.protocol import GenerationError
from vllm.logger import init_logger
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector

from engine.requests import admission, scheduling
from engine.requests.errors import IMPOSSIBLE
from engine.requests.grammar import Grammars

log = init_logger(__name__)
FAILED = "this request failed in the engine; its log has more"


class IsolatingLLM(AsyncLLM):  # type: ignore[misc]  # vLLM's classes are untyped
    """An AsyncLLM. Set `grammars` before it serves."""

    grammars: Grammars

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        isolate_outputs(self.output_processor)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As in vLLM. The call itself raises a refusal, before a stream has begun."""
        admission.check(prompt, sampling_params, request_id, self.model_config)
        return failing_aloud(super().generate(prompt, sampling_params, request_id, **options))

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *arguments: Any, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """As in vLLM, with the same checks."""
        admission.check(prompt, pooling_params, request_id, self.model_config)
        outputs: AsyncGenerator[PoolingRequestOutput, None] = super().encode(
            prompt, pooling_params, request_id, *arguments, **options
        )
        return outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *arguments: Any, **options: Any
    ) -> RequestOutputCollector:
        """As in vLLM, but only after the grammar is checked: vLLM parses it in this process."""
        if isinstance(params, SamplingParams):
            await self.grammars.check(params.structured_outputs)
        return await super().add_request(request_id, prompt, params, *arguments, **options)


async def failing_aloud(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request. Raises GenerationError if it failed in the engine: a 500, or an error event.

    vLLM reports nothing for a stream that fails before its first token.
    """
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason == "error":
                    raise GenerationError(IMPOSSIBLE if choice.stop_reason == scheduling.IMPOSSIBLE else FAILED)
            yield output


def isolate_outputs(processor: OutputProcessor) -> None:
    """Makes an exception in one request's output (text, probabilities) fail only that request.

    In vLLM it would fail every request, and all later ones.
    """
    original: Callable[..., OutputProcessorOutput] = processor.process_outputs

    def process_outputs(
        outputs: list[EngineCoreOutput], timestamp: float | None = None, stats: Any = None
    ) -> OutputProcessorOutput:
        made: list[Any] = []
        to_abort: list[str] = []
        for output in outputs:
            try:
                processed = original([output], timestamp, stats)
                made += processed.request_outputs
                to_abort += processed.reqs_to_abort
            except Exception as error:  # of any kind: the other requests go on
                log.exception("request %s: its output could not be made; it fails", output.request_id)
                state = processor.request_states.get(output.request_id)
                if state is not None and state.queue is not None:
                    state.queue.put(RuntimeError(f"the output could not be made: {type(error).__name__}"))
                    state.queue = None  # ending the request would use the queue, and might raise again
                processor.abort_requests([output.request_id], internal=True)
                to_abort.append(output.request_id)
        return OutputProcessorOutput(request_outputs=made, reqs_to_abort=to_abort)

    processor.process_outputs = process_outputs
