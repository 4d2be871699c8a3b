"""Writes ``docs/configuration.md`` and a page a section from the schema, so that pages and code cannot disagree.

A test compares the files with this output; ``ds-hf config docs -o docs/configuration.md`` renews them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ds_hf.config.presets import PRESETS
from ds_hf.config.schema import Node, Path, dotted, is_other_name, load_schema, types_of, walk

__all__ = ["configuration_pages"]

_WRITTEN = """<!-- Written by `ds-hf config docs -o docs/configuration.md` from the schema. Do not edit. -->
"""
_INTRO = f"""# Configuration

{_WRITTEN}
ds_hf takes DeepSpeed's JSON configuration. Comments, trailing commas and bare keys are allowed, duplicate keys are not.
An unknown key, a wrong type or an impossible combination is an error that names the place and the fix, and all errors
come at once:

```
ds-hf config new --preset zero2 -o ds.json              # a preset for the Trainer and accelerate, which fill it in
ds-hf config new --preset zero2 --for loop -o ds.json   # the same for a loop of your own, complete
ds-hf config check ds.json                              # check a file; --world-size 8 checks the batch keys as well
ds-hf config explain ds.json                            # every effective value and where it comes from
ds-hf config schema                                     # the JSON Schema, for editors
```

An editor that knows JSON Schema completes and checks while you type, once the file says where the schema is:
`"$schema": "path/to/ds_config.schema.json"`.

Each section of the file has a page: [Sections](#sections). What ds_hf does with a key:

- **yes**: it does what DeepSpeed's documentation says.
- **no effect**: it is accepted; setting it to anything but its default gives a warning with the reason.
- **refused**: it would change the training and is not implemented; switching it on is an error.

"auto" is allowed on the keys marked *auto*: the Trainer and accelerate fill them in. Anywhere else it is an error, and
so is one that reaches a plain `initialize()`, but for the sizes that follow from the model, which keep their defaults.
"""

_STATUS = {"implemented": "yes", "no-effect": "no effect", "unsupported": "refused"}


def configuration_pages() -> dict[str, str]:
    """The page at the entrance, named "", and one for each section of the file, by its name."""
    parts = [_INTRO, "## Presets\n", "| Name | What it is |\n|---|---|"]
    parts[-1] += "".join(f"\n| `{name}` | {text} |" for name, (text, _) in PRESETS.items()) + "\n"
    schema = load_schema()
    sections = {key: node for key, node in schema["properties"].items() if "properties" in node}
    current = {
        key: node for key, node in schema["properties"].items() if key not in sections and not node.get("deprecated")
    }
    parts.append("## Top level\n\n" + _table(list(_leaves(current, (), "implemented")), ""))
    parts += [_contents(sections), _second(), _older()]
    pages = {"": "\n".join(parts)}
    for key, node in sections.items():
        pages[key] = _section(key, node, "# ")
        if key == "scheduler":
            pages[key] = "\n".join([pages[key], *(_section(name, child) for name, child in schema["$defs"].items())])
    beside = {key: re.sub(r"\]\((?=[\w-]+\.md)", "](../", page) for key, page in pages.items() if key}
    return pages | beside


def _contents(sections: dict[str, Node]) -> str:
    """The table of sections: what each is for, and what ds_hf does with its keys."""
    lines = ["## Sections\n", "| Section | | yes | no effect | refused |", "|---|---|---|---|---|"]
    for key, node in sections.items():
        found = [status for _, _, status in _leaves(node["properties"], (), node.get("x-status", "implemented"))]
        counts = " | ".join(str(found.count(status) or "") for status in _STATUS)
        about = node["description"].split(". ")[0].rstrip(".:")
        lines.append(f'| <a id="{key}"></a>[`{key}`](configuration/{key}.md) | {_cell(about)} | {counts} |')
    return "\n".join(lines) + "\n"


def _section(key: str, node: Node, level: str = "## ") -> str:
    status = node.get("x-status", "implemented")
    rows = list(_leaves(node["properties"], (), status))
    top = [f"{level}{key}\n", _WRITTEN] if level == "# " else [f"{level}{key}\n"]
    lines = [*top, node["description"]]
    if status != "implemented":
        lines[-1] += f" **{_STATUS[status].capitalize()}**: {node['x-reason']}."
        if "x-fix" in node:
            lines[-1] += f" Instead: {node['x-fix']}."
    return "\n".join([*lines, "", _table(rows, f"{key}.")])


def _leaves(properties: dict[str, Node], path: Path, status: str) -> Iterator[tuple[str, Node, str]]:
    for key, node in properties.items():
        if is_other_name(node):
            continue
        here = (*path, key)
        mine = node.get("x-status", status)
        if "properties" in node and key != "params":
            yield from _leaves(node["properties"], here, mine)
        elif "properties" in node:
            yield dotted(here), node, mine
            yield from _leaves(node["properties"], here, mine)
        else:
            yield dotted(here), node, mine


def _table(rows: list[tuple[str, Node, str]], base: str) -> str:
    """One row a key, each with an anchor: ``configuration/zero_optimization.md#zero_optimization.stage``."""
    lines = ["| Key | Type | Default | ds_hf | |", "|---|---|---|---|---|"]
    lines += [
        f'| <a id="{base}{key}"></a>`{key}` | {_type(node)} | {_default(node)} | {_STATUS[status]} | {_text(node)} |'
        for key, node, status in rows
    ]
    return "\n".join(lines) + "\n"


def _type(node: Node) -> str:
    if "enum" in node:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in node["enum"])
    kinds = types_of(node) - ({"string"} if node.get("pattern") else set())
    names: list[str] = [
        kind for kind in ("boolean", "integer", "number", "string", "array", "object", "null") if kind in kinds
    ]
    names += ['`"auto"`'] if node.get("x-auto") == "literal" and node.get("pattern") == "^auto$" else []
    return " or ".join(names) + (", *auto*" if isinstance(node.get("x-auto"), dict) else "")


def _default(node: Node) -> str:
    return f"`{json.dumps(node['default'])}`" if "default" in node else ""


def _text(node: Node) -> str:
    text: str = node["description"]
    if "x-aliases" in node:
        text += f" Also called {' and '.join(f'`{name}`' for name in node['x-aliases'])}."
    if "x-changed" in node:
        was = json.dumps(node["x-changed"]["was"])
        text += f" Changed in DeepSpeed {node['x-changed']['since']}: was {was}."
    if "x-since" in node:
        text += f" Since {node['x-since']}."
    if node.get("x-status") in ("no-effect", "unsupported"):
        text += f" *{node['x-reason'][:1].upper()}{node['x-reason'][1:]}.*"
    for value, reason in node.get("x-unsupported-values", {}).items():
        text += f" *{value} is refused: {reason}.*"
    return _cell(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _second() -> str:
    """The table of second names."""
    lines = [
        "## Second names\n",
        "DeepSpeed takes these names as well, its own of the field. Both may be there if they agree.\n",
    ]
    lines += ["| Second name | First name |", "|---|---|"]
    for path, node in walk():
        if "x-alias-of" in node:
            lines.append(f"| `{dotted(path)}` | `{dotted((*path[:-1], node['x-alias-of']))}` |")
    return "\n".join(lines) + "\n"


def _older() -> str:
    """The table of older names."""
    schema = load_schema()
    roots = [(schema, ()), *((node, ("scheduler", "params")) for node in schema["$defs"].values())]
    lines = ["## Older names\n", "Each is accepted with one warning; together with its replacement it is an error.\n"]
    lines += ["| Older | Today |", "|---|---|", "| `zero_optimization: true` | `zero_optimization.stage: 1` |"]
    lines += ["| `fp16: true`, `bf16: true` | `fp16.enabled`, `bf16.enabled` |"]
    for root, base in roots:
        for path, node in _deprecated(root, base):
            new = (
                node["x-renamed-to"][1:].replace("/", ".") if "x-renamed-to" in node else f"ignored: {node['x-reason']}"
            )
            lines.append(f"| `{dotted(path)}` | {f'`{new}`' if 'x-renamed-to' in node else new} |")
    return "\n".join(lines) + "\n"


def _deprecated(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    for key, child in node.get("properties", {}).items():
        if child.get("deprecated"):
            yield (*path, key), child
        else:
            yield from _deprecated(child, (*path, key))
