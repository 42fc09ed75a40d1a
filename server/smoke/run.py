"""The steps in order: doctor, then for each model verify, plan, start, completions, long outputs, metrics, stop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quant.progress import OnProgress
from server.config.settings import load_config
from server.doctor import examine
from server.errors import UserError
from server.plan import NotPlannedError, plan_for
from server.plan.memory import gib
from server.run.child import Service, running
from server.run.servable import device_here
from server.scrape import Metrics, scrape
from server.smoke import checks
from server.smoke.steps import Result, Step, take, worst

SOURCE_MODEL = "smollm2"
OnStep = Callable[[Step], None]
# A model's steps in order. A step is skipped where an earlier step that it needs has failed.
SERVED_STEPS = ("completions", "long outputs", "metrics", "stop")


@dataclass
class Smoke:
    """A smoke test at work. `module` is the Python module that is `serve`."""

    logs: Path
    on_progress: OnProgress
    on_step: OnStep
    module: str = "server"
    steps: list[Step] = field(default_factory=list)

    def look_at_machine(self, model: Path | None) -> None:
        """`doctor`, with the disk under the model where the model exists already."""
        self._take("doctor", "", lambda: _doctor(model if model is not None and model.is_dir() else None))

    def make_small_model(self, model: Path) -> None:
        """Makes the small model as `make models/smollm2-nvfp4` does, where it does not exist."""
        if not (model / "config.json").exists():
            self._take("make the model", str(model), lambda: _make_small_model(model, self.on_progress))

    def go_through(self, model: Path, flags: Sequence[str]) -> None:
        """All steps of one model; `flags` are serve's."""
        name = str(model)
        arguments = ["--model", name, *flags]
        verified = self._take("verify", name, lambda: _verify(model, self.on_progress))
        planned = self._take("plan", name, lambda: _plan(arguments))
        if "error" in {verified.result.verdict, planned.result.verdict}:
            self._skip(("start", *SERVED_STEPS), name, "the model or its plan is no good")
            return
        began = time.monotonic()
        log = self.logs / f"{len(self.steps)}.log"
        try:
            with running(arguments, log, module=self.module) as service:
                seconds = service.wait_until_ready("start", self.on_progress)
                health = service.health()
                summary = f"ready in {time.monotonic() - began:.1f} s; preset {health['preset']}"
                odd = tuple(health["warnings"])
                conversation = checks.Conversation(service, load_config(arguments).served_model_name[0])
                before = scrape(service.url)
                self._keep(Step("start", name, seconds, Result("warning" if odd else "ok", summary, odd)))
                self._use(conversation, before, name)
        except UserError as error:
            self._keep(Step("start", name, time.monotonic() - began, Result("error", str(error))))
            self._skip(SERVED_STEPS, name, "the service did not start")

    def _use(self, conversation: checks.Conversation, before: Metrics, name: str) -> None:
        service = conversation.service
        self._take("completions", name, lambda: checks.ask_in_two_languages(conversation))
        self._take("long outputs", name, lambda: checks.write_at_length(conversation, self.on_progress))
        self._take("metrics", name, lambda: checks.judge_metrics(before, scrape(service.url), conversation.tokens))
        self._take("stop", name, lambda: _stop(service))

    def _take(self, name: str, model: str, work: Callable[[], Result]) -> Step:
        return self._keep(take(name, model, work))

    def _skip(self, names: Sequence[str], model: str, why: str) -> None:
        for name in names:
            self._keep(Step(name, model, 0.0, Result("skipped", why)))

    def _keep(self, step: Step) -> Step:
        self.steps.append(step)
        self.on_step(step)
        return step


def _doctor(model: Path | None) -> Result:
    findings = examine(model, "127.0.0.1", 0, 900, quick=False)
    levels = [finding.level for finding in findings]
    shown = tuple(f"{one.level}: {one}" for one in findings if one.level in {"error", "warning"})
    counts = f"{len(findings)} findings, {levels.count('error')} errors, {levels.count('warning')} warnings"
    return Result("error" if "error" in levels else "warning" if "warning" in levels else "ok", counts, shown)


def _make_small_model(model: Path, on_progress: OnProgress) -> Result:
    from quant.models import fetch_model
    from quant.quantize import quantize_checkpoint

    source = model.with_name(SOURCE_MODEL)
    if not (source / "config.json").exists():
        fetch_model(SOURCE_MODEL, source, on_progress)
    report = quantize_checkpoint(source, model, on_progress=on_progress)
    return Result("ok", f"{len(report.quantized)} linear layers of {source} in NVFP4")


def _verify(model: Path, on_progress: OnProgress) -> Result:
    from quant.verify import Target, verify

    report = verify(model, "full", target=Target(device_here()), on_progress=on_progress)
    severe = tuple(f"{one.severity}: {one}" for one in report.findings if one.severity in {"error", "warning"})
    summary = f"{report.scheme.format if report.scheme else '16-bit'}, {len(report.tensors)} tensors, every byte read"
    return Result("error" if not report.ok else "warning" if severe else "ok", summary, severe)


def _plan(arguments: Sequence[str]) -> Result:
    try:
        plan = plan_for(load_config(arguments)).plan
    except NotPlannedError as error:
        return Result("warning", f"not planned: {error}")
    used = sum(item.bytes for item in plan.items) + plan.cache_bytes
    summary = f"{gib(used)} of {gib(plan.budget_bytes)}; {plan.tokens:,} tokens of cache"
    return Result("ok" if plan.fits else "error", summary, plan.problems)


def _stop(service: Service) -> Result:
    """Stops the service in order and checks that no process of it is left."""
    family = descendants(service.process.pid)
    began = time.monotonic()
    code = service.stop()
    left = [pid for pid in family if _alive(pid)]
    problems = []
    if code:
        problems.append(f"exit code: expected 0, got {code}; the log's last lines say why")
    if left:
        problems.append(f"processes: expected none left, got {', '.join(map(str, left))}")
    summary = f"{len(family) + 1} processes ended in {time.monotonic() - began:.1f} s"
    return Result(worst(["error"] if problems else []), summary, tuple(problems))


def descendants(pid: int) -> list[int]:
    """All processes below a process (proc(5): task/TID/children)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
        except OSError:  # it ended while we looked
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
