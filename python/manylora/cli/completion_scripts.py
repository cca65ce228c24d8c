"""Completions as each shell has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.cli.completions import Command, Option


def _all(command: Command) -> list[Command]:
    return list(command.walk())


def _words(path: tuple[str, ...]) -> str:
    return " ".join(path)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def bash(program: Command) -> str:
    """Return a script for bash: files where nothing else is known."""
    return "\n".join(_bash(program)) + "\n"


def _bash(program: Command) -> Iterator[str]:
    yield "# Completions of manylora for bash, written by `manylora completions bash`."
    yield "_manylora_files() {"
    yield "    compopt -o filenames 2>/dev/null"
    # One name a line, whatever is in it.
    yield "    local IFS=$'\\n'"
    yield '    COMPREPLY=($(compgen -f -- "$cur"))'
    yield "}"
    yield "_manylora() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev="" path="" flags="" words="" i'
    yield "    (( COMP_CWORD > 0 )) && prev=${COMP_WORDS[COMP_CWORD-1]}"
    yield "    # `--flag=value` comes as three words."
    yield "    [[ $cur == = ]] && cur=''"
    yield "    [[ $prev == = ]] && (( COMP_CWORD > 1 )) && prev=${COMP_WORDS[COMP_CWORD-2]}"
    yield "    for (( i = 1; i < COMP_CWORD; i++ )); do"
    yield '        case "$path/${COMP_WORDS[i]}" in'
    paths = [command.path for command in _all(program) if command.path]
    patterns = "|".join(_quoted("/".join(("", *path))) for path in paths)
    yield f"            {patterns}) path+=/${{COMP_WORDS[i]}} ;;"
    yield "        esac"
    yield "    done"
    yield '    case "$path" in'
    for command in _all(program):
        options = command.options
        yield "        " + _quoted("/".join(("", *command.path)) if command.path else "") + ")"
        flags = " ".join(name for option in options for name in option.names)
        yield f"            flags={_quoted(flags)}"
        yield "            words=" + _quoted(" ".join([*command.commands, *command.choices]))
        yield '            case "$prev" in'
        for option in options:
            if option.takes_value and option.choices:
                names = "|".join(option.names)
                listed = _quoted(" ".join(option.choices))
                yield f'                {names}) COMPREPLY=($(compgen -W {listed} -- "$cur")); return ;;'
        others = [name for option in options if option.takes_value and not option.choices for name in option.names]
        if others:
            yield f"                {'|'.join(others)}) _manylora_files; return ;;"
        yield "            esac ;;"
    yield "    esac"
    yield "    if [[ $cur == -* ]]; then"
    yield '        COMPREPLY=($(compgen -W "$flags" -- "$cur"))'
    yield "    elif [[ -n $words ]]; then"
    yield '        COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "    else"
    yield "        _manylora_files"
    yield "    fi"
    yield "}"
    yield "complete -F _manylora manylora"


def zsh(program: Command) -> str:
    """Return a script for zsh, for a file `_manylora` in a folder of its `fpath`."""
    return "\n".join(_zsh(program)) + "\n"


def _zsh(program: Command) -> Iterator[str]:
    yield "#compdef manylora"
    yield "# Completions of manylora for zsh, written by `manylora completions zsh`."
    for command in reversed(_all(program)):
        yield f"{_function(command)}() {{"
        yield "    local context state state_descr line"
        yield "    typeset -A opt_args"
        yield "    _arguments -C \\"
        for option in command.options:
            yield from (f"        {_quoted(spec)} \\" for spec in _zsh_options(option))
        if command.commands:
            yield "        '1:command:->command' '*::argument:->argument'"
            yield "    case $state in"
            yield "        command)"
            yield "            local -a commands=("
            for name, below in command.commands.items():
                yield "                " + _quoted(f"{name}:{_escaped(below.help)}")
            yield "            )"
            yield "            _describe command commands ;;"
            yield "        argument)"
            yield "            case $line[1] in"
            for name, below in command.commands.items():
                yield f"                {name}) {_function(below)} ;;"
            yield "            esac ;;"
            yield "    esac"
        else:
            listed = " ".join(command.choices)
            yield "        " + _quoted(f"*:argument:({listed})" if listed else "*:file:_files")
        yield "}"
    yield '_manylora "$@"'


def _function(command: Command) -> str:
    return "_" + "_".join(("manylora", *command.path))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:").replace("[", "\\[").replace("]", "\\]")


def _zsh_options(option: Option) -> Iterator[str]:
    value = ""
    if option.takes_value:
        value = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files"
    for name in option.names:
        yield f"{name}[{_escaped(option.help)}]{value}"


def fish(program: Command) -> str:
    """Return a script for fish."""
    return "\n".join(_fish(program)) + "\n"


def _fish(program: Command) -> Iterator[str]:
    yield "# Completions of manylora for fish, written by `manylora completions fish`."
    yield "complete -c manylora -e"
    yield "function __manylora_is"
    yield "    # Whether the words so far name exactly this command."
    yield "    set -l path"
    yield "    for word in (commandline -opc)[2..-1]"
    yield "        switch (string join -- / $path $word)"
    paths = " ".join(_quoted("/".join(command.path)) for command in _all(program) if command.path)
    yield f"            case {paths}"
    yield "                set -a path $word"
    yield "        end"
    yield "    end"
    yield '    test "$path" = "$argv"'
    yield "end"
    for command in _all(program):
        condition = "-n " + _quoted(f"__manylora_is {_words(command.path)}".strip())
        for name, below in command.commands.items():
            yield f"complete -c manylora {condition} -f -a {name} -d {_quoted(below.help)}"
        if command.choices:
            listed = _quoted(" ".join(command.choices))
            yield f"complete -c manylora {condition} -f -a {listed}"
        for option in command.options:
            names = [_fish_name(name) for name in option.names]
            value = ""
            if option.takes_value:
                value = " -x -a " + _quoted(" ".join(option.choices)) if option.choices else " -r"
            spelled, text = " ".join(names), _quoted(option.help)
            yield f"complete -c manylora {condition} {spelled}{value} -d {text}"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"
