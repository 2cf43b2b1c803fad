"""What TensorBoard tells of a run in words: its recipe, its network, its ranks, and its hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.values import all_settings
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
    return RunDescription(
        texts={
            "recipe": recipe_text(context.config),
            "model": model_text(context.config.model.model, _parameters(context), context.cost),
            "ranks": ranks_text(hosts, bindings),
        },
        hparams=hyperparameters(context),
        scores=[
            name
            for score in context.task.scores
            for name in (score, f"ema_{score}" if context.config.update.ema_decay else "")
            if name
        ],
    )


def recipe_text(config: Config) -> str:
    """Return all settings in Markdown, first those that differ from their defaults."""
    stated = [setting for setting in all_settings() if setting.name in config.stated]
    rows = [
        f"| {setting.group} | `{setting.name}` | `{getattr(getattr(config, setting.group), setting.name)!r}` "
        f"| `{setting.default!r}` |"
        for setting in stated
    ]
    table = "\n".join(["| group | setting | value | default |", "|---|---|---|---|", *rows])
    differing = table if stated else "Every setting has its default."
    titles = ("#### Settings that differ from their defaults", "#### resolved.toml")
    return "\n\n".join([titles[0], differing, titles[1], _code(dump(config))])


def model_text(name: str, parameters: int, cost: ModelCost) -> str:
    """Return the blocks of the network, their parameters and their operations in Markdown."""
    total = f"**{name}**: {parameters:,} parameters"
    if cost.forward_flops:
        total += f", {cost.forward_flops / 1e9:.3g} GFLOPs in the forward of one image"
    elif cost.problem:
        total += f"; operations are not counted: {cost.problem}"
    rows = [
        f"| `{block.name}` | {block.kind} | {block.parameters:,} | {block.flops / 1e6:,.1f} |"
        for block in cost.blocks
    ]
    head = ["| block | class | parameters | MFLOPs of a forward |", "|---|---|--:|--:|"]
    return "\n".join([total, "", *head, *rows])


def ranks_text(hosts: Sequence[str], bindings: Sequence[str]) -> str:
    """Return the host, the device and the binding of each rank in Markdown."""
    rows = []
    for rank, (host, text) in enumerate(zip(hosts, bindings, strict=True)):
        device, _, binding = text.partition("; ")
        rows.append(f"| {rank} | {host} | {device} | {binding} |")
    return "\n".join(["| rank | host | device | binding |", "|--:|---|---|---|", *rows])


def hyperparameters(context: TrainContext) -> dict[str, HparamValue]:
    """Return the settings by which runs are compared, and what follows from the number of ranks."""
    config = context.config
    found: dict[str, HparamValue] = {
        setting.name: getattr(getattr(config, setting.group), setting.name)
        for setting in all_settings()
        if setting.name in _COMPARED
    }
    derived = {
        "ranks": context.world.size,
        "global_batch": context.derived.global_batch,
        "peak_lr": context.derived.peak_lr,
        "parameters": _parameters(context),
    }
    return found | derived


def _parameters(context: TrainContext) -> int:
    return sum(parameter.numel() for parameter in context.model.parameters())


def _code(text: str) -> str:
    # An indented block: in a fenced one, a setting could end the fence.
    return "\n".join(f"    {line}" for line in text.splitlines())
