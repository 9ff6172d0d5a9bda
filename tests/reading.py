"""Parse an HTML page as a browser does."""

from html.parser import HTMLParser

VOID = {"img", "link", "meta", "br", "col"}


class Read(HTMLParser):
    """A parsed page; fails on unbalanced tags, duplicate attributes, scripts and event handlers."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.images, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"duplicate attribute in {tag}"
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[k] for k in ("href", "src", "srcset", "action", "data", "poster") if k in given]
        if tag == "img":
            self.images.append(given)
        assert not any(k.startswith("on") for k in given)
        assert tag not in ("script", "iframe", "object", "embed")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
