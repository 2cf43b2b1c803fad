"""Prints a script that completes commands and flags of `horovod-volo` in bash or zsh.

    eval "$(horovod-volo completion bash)"      in ~/.bashrc
    eval "$(horovod-volo completion zsh)"       in ~/.zshrc

The words are in the script, so that completing starts no Python. Exit status: 0 done; 2 a mistake in the
command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from horovod_volo.config.arguments import Parser
from horovod_volo.config.recipe import recipe_names
from horovod_volo.core.errors import UserError, print_error

DONE, MISTAKE = 0, 2
# The modules that have a function `build_parser`.
_PARSERS = {
    "train": "horovod_volo.config.command_line",
    "doctor": "horovod_volo.doctor.__main__",
    "report": "horovod_volo.report.__main__",
    **{
        name: f"horovod_volo.{name}"
        for name in ("evaluate", "predict", "export", "labels", "pack", "build_horovod")
    },
}


def main(arguments: Sequence[str]) -> int:
    """Print the script."""
    try:
        shell = build_parser().parse_args(arguments).shell
    except UserError as problem:
        print_error(f"error: {problem}")
        return MISTAKE
    print(script(shell))
    return DONE


def build_parser() -> Parser:
    """Build the command line."""
    parser = Parser(prog="python -m horovod_volo.completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="{bash,zsh}", help="the shell")
    return parser


def script(shell: str) -> str:
    """Return the script for a shell."""
    commands = " ".join([*_PARSERS, "bench", "completion"])
    of_commands, of_flags = [], []
    for name, module in _PARSERS.items():
        flags, others = _words(import_module(module).build_parser())
        of_commands.append(f'        {name}) flags="{" ".join([*flags, *others])}" ;;')
        # By command too: a flag of the same name may take other values in another command.
        for flag, found in flags.items():
            if values := " ".join(recipe_names()) if flag == "--recipe" else found:
                case = f'"{name} {flag}") COMPREPLY=($(compgen -W "{values}" -- "$word")); return ;;'
                of_flags.append(f"        {case}")
    lines = [
        "_horovod_volo() {",
        '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags=""',
        "    COMPREPLY=()",
        "    if [[ $COMP_CWORD == 1 ]]; then",
        f'        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word")); return',
        "    fi",
        '    case "${COMP_WORDS[1]} $before" in',
        *sorted(of_flags),
        "    esac",
        '    case "${COMP_WORDS[1]}" in',
        *of_commands,
        "    esac",
        '    COMPREPLY=($(compgen -W "$flags" -- "$word"))',
        '    [[ $word == -* ]] || COMPREPLY+=($(compgen -f -- "$word"))',
        "}",
        "complete -o filenames -F _horovod_volo horovod-volo",
    ]
    before = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*before, *lines])


def _words(parser: argparse.ArgumentParser) -> tuple[dict[str, str], list[str]]:
    """Return the flags of a command with the values they take, if those are few; and its own commands."""
    flags: dict[str, str] = {}
    commands: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += action.choices
            for below in action.choices.values():
                flags |= _words(below)[0]
        for flag in action.option_strings:
            if flag.startswith("--"):
                flags[flag] = _values(action)
    return flags, commands


def _values(action: argparse.Action) -> str:
    choices = action.choices
    if choices is None and isinstance(action.metavar, str) and action.metavar.startswith("{"):
        choices = action.metavar[1:-1].split(",")
    return " ".join(map(str, choices)) if choices else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
