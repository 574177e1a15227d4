"""The commands of a study, to run its arms as separate jobs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from experiments.config import Plan
from train.config.finetuning import FinetuneConfig
from train.config.pretraining import Config

_RESUME = ("--resume", "auto")
_RECORD = ("--record", "bench/results/experiments.jsonl")


def commands_of(plan: Plan, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[str]:
    """Shell commands, in an order in which each finds what it needs; lines that begin with # are comments.

    Args:
        plan: the study.
        overrides: the overrides of the study, for the last command.
        only: the arms that were asked for, for the last command.
    """
    rendered = {one.root: one.render for one in plan.used_data().values() if one.render is not None}
    for root, render in rendered.items():
        size = ["--poses", render.poses, "--seed", render.seed, "--scenes", render.scenes]
        yield _line("python", "cli.py", "make-data", root, *size)
    python = ("python", "cli.py")
    if plan.pretrain:
        yield f"# pre-training: {len(plan.pretrain)} arms, {len(plan.study.seeds)} seeds"
    for seed in plan.study.seeds:
        for name in plan.pretrain:
            config, keys = plan.settings(Config, name, seed)
            processes = min(plan.at.processes, config.train.batch // config.train.micro_batch)
            launcher = ("torchrun", f"--nproc-per-node={processes}", "cli.py") if processes > 1 else python
            yield _line(
                *launcher, "pretrain", *_config("-c", plan.at.pretrain.config), *_config("--set", keys), *_RESUME
            )
    yield f"# {plan.at.by}: each network, when the pre-training that it starts from is done"
    for seed in plan.study.seeds:
        for name, arm in plan.arms.items():
            if arm.network is None:
                _, keys = plan.settings(FinetuneConfig, name, seed)
                files = plan.at.measured.config
                yield _line(*python, plan.at.by, *_config("-c", files), *_config("--set", keys), *_RESUME)
    yield "# evaluation of each network; after fine-tuning with validation, of its best checkpoint"
    for seed in plan.study.seeds:
        for name in plan.arms:
            out = ("--out", plan.folder(seed, "evaluation", name))
            yield _line(*python, "evaluate", plan.run_of(name, seed), *_config("--set", plan.held_out(name)), *out)
    yield "# when all runs are done: measure what the study compares, and record it"
    chosen = (*_config("--set", overrides), *_config("--arm", only))
    yield _line(*python, "experiment", plan.file, "--scale", plan.scale, *chosen, *_RECORD)


def _config(name: str, values: Sequence[object]) -> Iterator[object]:
    for value in values:
        yield from (name, value)


def _line(*words: object) -> str:
    return shlex.join(map(str, words))
