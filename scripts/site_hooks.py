"""Hooks of the site's generator: files of the repository that pages link to, the list of decisions, and no outside."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(\s*([^)\s#]+)(#[^)\s]*)?\)")
AT_ROOT = ("CONTRIBUTING.md", "SECURITY.md")  # pages of the site although they lie beside docs/
LANGUAGES = {".py": "python", ".toml": "toml", "": "sh"}
OUTSIDE = re.compile(
    r"""<(?:script|link(?![^>]*canonical)|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)


def on_config(config: Any) -> Any:
    """The pages of decisions in the place of their pattern."""
    _expand(config.nav)
    return config


def _expand(entries: list[Any]) -> None:
    for index, entry in enumerate(entries):
        if entry == "decisions/*.md":
            entries[index : index + 1] = [f"decisions/{path.name}" for path in _decisions()]
            return
        for inner in entry.values() if isinstance(entry, dict) else ():
            if isinstance(inner, list):
                _expand(inner)


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/ that its pages name: texts as pages, others as they are."""
    for name in AT_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for target in _outside(page.content_string, page.src_uri):
            uri = _uri(target)
            if files.get_file_from_path(uri) is not None:
                continue
            path = ROOT / target
            if path.suffix in LANGUAGES:
                text = path.read_text(encoding="utf-8")
                content = f"# `{target}`\n\n```` {LANGUAGES[path.suffix]}\n{text}````\n"
                files.append(File.generated(config, uri, content=content))
            else:
                file = File.generated(config, uri, abs_src_path=str(path))
                files.append(file)
                if path.suffix == ".md":
                    pages.append(file)  # a page of results, whose links are followed too
    return files


def _target(link: str, uri: str) -> str:
    """A link's path from the repository's root; pages of docs/ begin with docs/."""
    home = "" if uri in AT_ROOT or uri.startswith("source/") else "docs"
    uri = uri.removeprefix("source/")
    return posixpath.normpath(posixpath.join(home, posixpath.dirname(uri), link))


def _outside(text: str, uri: str) -> list[str]:
    targets = [_target(link, uri) for link, _ in LINK.findall(_prose(text)) if "://" not in link]
    return [target for target in targets if not target.startswith("docs/") and target not in AT_ROOT]


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _uri(target: str) -> str:
    """Where a file of the repository lies in the site's sources."""
    if target in AT_ROOT:
        return target
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}" + (".md" if Path(target).suffix in LANGUAGES else "")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has the files; the list of decisions under their page."""
    uri = page.file.src_uri
    if uri.startswith("source/") and not (ROOT / uri.removeprefix("source/")).is_file():
        return markdown  # the listing of a program

    def moved(match: re.Match[str]) -> str:
        link, anchor = match.group(1), match.group(2) or ""
        if "://" in link or link.startswith("mailto:"):
            return match.group(0)
        there = _uri(_target(link, uri))
        there = "decisions/README.md" if there == "decisions" else there
        return f"]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"

    text = LINK.sub(moved, markdown)
    if uri == "decisions/README.md":
        titles = [(path.name, path.read_text(encoding="utf-8").split("\n", 1)[0][2:]) for path in _decisions()]
        text += "\n" + "".join(f"- [{title}]({name})\n" for name, title in titles)
    return text


def on_post_build(config: Any) -> None:
    """Raises: PluginError where a page would load something from another host."""
    found = []
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        found += [f"{path.name}: {tag[:120]}" for tag in OUTSIDE.findall(path.read_text(encoding="utf-8"))]
    if found:
        raise PluginError("pages load from other hosts:\n" + "\n".join(found))
