"""The readable text of an HTML page: a program for the sandbox, since pages are anybody's and parsers are C.

Reads the page from stdin behind a line of JSON, ``{"url", "charset"}``; writes ``{"title", "text", "links"}`` as JSON.
"""

import json
import sys

import lxml.html
import trafilatura

MAX_LINKS = 1000
LONGEST_TEXT = 500_000
"""Characters."""
LONGEST_LINK_TEXT = 200


def decoded(body: bytes, charset: str | None) -> bytes | str:
    """Text, if the server told the charset and it is one; else trafilatura looks for what the page says."""
    try:
        return body.decode(charset, "replace") if charset else body
    except (LookupError, UnicodeError):
        return body


def links_of(tree: lxml.html.HtmlElement, url: str) -> list[tuple[str, str]]:
    """Words and address of each link to another page, once."""
    tree.make_links_absolute(url, resolve_base_href=True, handle_failures="discard")
    found: dict[str, str] = {}
    for element in tree.iter("a"):
        target = (element.get("href") or "").partition("#")[0]
        if target.startswith(("http://", "https://")) and target != url.partition("#")[0]:
            words = " ".join(element.text_content().split())[:LONGEST_LINK_TEXT]
            found[target] = found.get(target) or words
        if len(found) == MAX_LINKS:
            break
    return [(words, target) for target, words in found.items()]


def main() -> None:
    head = json.loads(sys.stdin.buffer.readline())
    content = decoded(sys.stdin.buffer.read(), head["charset"])
    tree = trafilatura.load_html(content)
    if tree is None:
        print(json.dumps({"title": "", "text": "", "links": []}))
        return
    title = " ".join((tree.findtext(".//title") or "").split())
    links = links_of(tree, head["url"])
    text = trafilatura.extract(tree, url=head["url"], output_format="markdown", include_comments=False, fast=True)
    text = text or trafilatura.html2txt(content) or ""
    print(json.dumps({"title": title[:500], "text": text[:LONGEST_TEXT], "links": links}))


if __name__ == "__main__":
    main()
