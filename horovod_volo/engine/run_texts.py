"""What TensorBoard tells of a run in words: its recipe, its network, its ranks, and its hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import indent

from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config, all_settings
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.model_cost import ModelCost
from horovod_volo.monitor.event_records import HparamValue
from horovod_volo.monitor.logger import RunDescription

# Settings by which runs are compared. They are the same for all runs: TensorBoard takes the columns of its
# table from one of them.
_COMPARED = (
    *("model", "img_size", "finetune", "drop_path", "precision", "batch_size", "epochs", "warmup_epochs"),
    *("opt", "weight_decay", "ema_decay", "sched", "aa", "reprob", "mixup"),
    *("token_label", "mix_token", "smoothing", "seed"),
)


def describe_run(context: TrainContext, hosts: Sequence[str], bindings: Sequence[str]) -> RunDescription:
    """Describe the run; `hosts` and `bindings` are those of the ranks."""
    prefixes = ("", "ema_") if context.config.update.ema_decay else ("",)
    return RunDescription(
        texts={
            "recipe": recipe_text(context.config),
            "model": model_text(context.config.model.model, _parameters(context), context.cost),
            "ranks": ranks_text(hosts, bindings),
        },
        hparams=hyperparameters(context),
        scores=[prefix + score for score in context.task.scores for prefix in prefixes],
    )


def recipe_text(config: Config) -> str:
    """Return all settings in Markdown, first those that differ from their defaults."""
    rows = [
        (item.group, f"`{item.name}`", f"`{item.value_in(config)!r}`", f"`{item.default!r}`")
        for item in all_settings()
        if item.name in config.non_default
    ]
    table = _table("group", "setting", "value", "default", rows=rows)
    differing = table if rows else "Every setting has its default."
    titles = ("#### Settings that differ from their defaults", "#### resolved.toml")
    # An indented block: in a fenced one, a setting could end the fence.
    return "\n\n".join(
        [titles[0], differing, titles[1], indent(dump(config).rstrip("\n"), "    ", lambda _: True)]
    )


def model_text(name: str, parameters: int, cost: ModelCost) -> str:
    """Return the blocks of the network, their parameters and their operations in Markdown."""
    total = f"**{name}**: {parameters:,} parameters"
    if cost.forward_flops:
        total += f", {cost.forward_flops / 1e9:.3g} GFLOPs in the forward of one image"
    elif cost.problem:
        total += f"; operations are not counted: {cost.problem}"
    rows = [
        (f"`{block.name}`", block.kind, f"{block.parameters:,}", f"{block.flops / 1e6:,.1f}")
        for block in cost.blocks
    ]
    return f"{total}\n\n{_table('block', 'class', 'parameters:', 'MFLOPs of a forward:', rows=rows)}"


def ranks_text(hosts: Sequence[str], bindings: Sequence[str]) -> str:
    """Return the host, the device and the binding of each rank in Markdown."""
    devices = [text.partition("; ")[::2] for text in bindings]
    rows = [(f"{rank}", host, *devices[rank]) for rank, host in enumerate(hosts)]
    return _table("rank:", "host", "device", "binding", rows=rows)


def _table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown; a column whose name ends in a colon is aligned to the right."""
    titles = [name.removesuffix(":") for name in head]
    rule = "".join("|--:" if name.endswith(":") else "|---" for name in head)
    return "\n".join([f"| {' | '.join(titles)} |", f"{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])


def hyperparameters(context: TrainContext) -> dict[str, HparamValue]:
    """Return the settings by which runs are compared, and what follows from the number of ranks."""
    return {
        **{item.name: item.value_in(context.config) for item in all_settings() if item.name in _COMPARED},
        "ranks": context.world.size,
        "global_batch": context.derived.global_batch,
        "peak_lr": context.derived.peak_lr,
        "parameters": _parameters(context),
    }


def _parameters(context: TrainContext) -> int:
    return sum(parameter.numel() for parameter in context.model.parameters())
