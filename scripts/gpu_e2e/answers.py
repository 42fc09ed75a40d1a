"""Asks an engine fixed questions and records its answers, with their probabilities.

    python -m scripts.gpu_e2e.answers --make-questions MODEL QUESTIONS     prompts and texts as token ids
    python -m scripts.gpu_e2e.answers --questions QUESTIONS MODEL OUTPUT [engine flags …]

20 prompts are continued greedily by 64 tokens, one after another and all together. Two texts are scored: the record has
every token's log probability. compare.py compares two such files.
"""

import argparse
import json
from pathlib import Path

from trials.answers import ask, make_questions
from trials.served import serve


def main() -> None:
    """Writes the questions, or the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-questions", action="store_true")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    arguments, flags = parser.parse_known_args()
    if arguments.make_questions:
        arguments.output.write_text(json.dumps(make_questions(arguments.model)))
        return
    questions = json.loads(arguments.questions.read_text())
    with serve(arguments.model, flags, arguments.output.with_suffix(".log")) as engine:
        started = {"flags": flags, "start_seconds": engine.start_seconds, "decisions": engine.decisions}
        arguments.output.write_text(json.dumps(started | ask(engine, questions)))


if __name__ == "__main__":
    main()
