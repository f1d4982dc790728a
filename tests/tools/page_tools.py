"""HTML pages as tests look at them."""

from html.parser import HTMLParser

VOID = {"meta", "link", "input"}
NAMES = ("aria-label", "rdf:resource")
"""Attributes of words and names, which no browser fetches."""


class Page(HTMLParser):
    """(tag, attributes, texts) of each element; complains about tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open, "an element is never closed"

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"<{tag}> has an attribute twice: {attrs}"
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        for _, _, texts in self.open:
            texts.append(data)

    def texts(self, tag):
        return ["".join(texts) for name, _, texts in self.elements if name == tag]

    def check_nothing_is_fetched(self):
        for tag, attributes, _ in self.elements:
            assert tag not in ("iframe", "object", "embed", "img", "video", "base", "form")
            for name, value in attributes.items():
                assert not name.startswith("on"), f"<{tag} {name}>"
                if not name.startswith("xmlns") and name not in NAMES:
                    assert "//" not in value, f"<{tag} {name}={value!r}>"
                if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                    assert value.startswith("#") or value == "data:,", f"<{tag} {name}={value!r}>"
