"""A queueing simulation of `voltserve deploy` with up to 100 machines: where gateway and Ray's head become the limit.

trials/cluster_simulation.py describes the model. Its costs are those that tests/cluster/bench.py measured. Ray's load
is a straight line through its measurements with 1, 2, 3 and 9 replicas, extrapolated. The measured runs are simulated
first, to show the simulation's error.

    .venv/bin/python -m scripts.simulate_cluster --runs docs/results/cluster-DATE.json --out docs/results/NAME.json
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from trials.cluster_simulation import (
    ANSWER,
    BUSY,
    SLOTS,
    TOKENS_A_SECOND,
    Costs,
    check,
    gateway_limit,
    grow,
    head_load,
    plot,
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="result of tests/cluster/bench.py")
    parser.add_argument("--out", type=Path, help="file for the results; a plot is put beside it")
    parser.add_argument("--seconds", type=float, default=240, help="of service that is simulated at each size")
    args = parser.parse_args()
    runs = json.loads(args.runs.read_text(encoding="utf-8"))
    measured = runs["one_replica_both_ways"]
    costs = Costs(measured["gateway_cpu_us_a_request"] / 1e6, measured["gateway_cpu_us_a_token"] / 1e6)
    rows = grow(costs, args.seconds)
    result = {
        "kind": "computed",
        "date": date.today().isoformat(),
        "command": " ".join(["scripts.simulate_cluster", *sys.argv[1:]]),
        "from": {"file": args.runs.name, "gateway_cpu_us": {"request": measured["gateway_cpu_us_a_request"],
                                                            "token": measured["gateway_cpu_us_a_token"]}},
        "check": check(runs, costs),
        "machine": {"slots": SLOTS, "tokens_per_second": TOKENS_A_SECOND, "tokens_an_answer": ANSWER, "busy": BUSY},
        "gateway": gateway_limit(costs),
        "head": head_load(runs),
        "machines": rows,
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "machines"}, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        plot(rows, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
