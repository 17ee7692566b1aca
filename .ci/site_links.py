"""For `make docs`: files of the repository that are not pages of the site are named, not linked."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """`[text](../benchmarks/x.py)` becomes text followed by the path, unless the text is the path."""

    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        return f"`{path}`" if text in path else f"{text} (`{path}`)"

    return re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|CONTRIBUTING|README|SECURITY|examples)[^)]*)\)", named, markdown
    )
