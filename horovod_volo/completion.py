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
_PARSERS = {  # the modules that have a function `build_parser`
    "train": "config.command_line",
    "doctor": "doctor.__main__",
    "report": "report.__main__",
    **{name: name for name in ("evaluate", "predict", "export", "labels", "pack", "build_horovod")},
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
    commands = [*_PARSERS, "bench", "completion", "--help", "--version"]
    cases = [f'"1 "*) words="{" ".join(commands)}" ;;']
    for name, module in _PARSERS.items():
        words = _words(import_module(f"horovod_volo.{module}").build_parser())
        # By command too: a flag of the same name may take other values in another command.
        cases += [f'*" {name} {flag}") words="{values}" ;;' for flag, values in words.items() if values]
        cases.append(f'*" {name} "*) words="{" ".join(words)}" files=yes ;;')
    lines = [
        "_horovod_volo() {",
        '    local word=${COMP_WORDS[COMP_CWORD]} words="" files=""',
        '    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
        *(f"        {case}" for case in [*cases, "*) files=yes ;;"]),
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        '    [[ ! $files || $word == -* ]] || COMPREPLY+=($(compgen -f -- "$word"))',
        "}",
        "complete -o filenames -F _horovod_volo horovod-volo",
    ]
    before = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*before, *lines])


def _words(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return a command's flags and commands of its own, each with the values it takes, if those are few."""
    words: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= dict.fromkeys(action.choices, "")
            for below in action.choices.values():
                words |= _words(below)
        choices = action.choices or ()
        if isinstance(action.metavar, str) and action.metavar.startswith("{"):
            choices = action.metavar[1:-1].split(",")
        for flag in action.option_strings:
            if flag.startswith("--"):
                words[flag] = " ".join(map(str, recipe_names() if flag == "--recipe" else choices))
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
