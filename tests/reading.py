"""Reading a page of HTML as a browser's parser does."""

from html.parser import HTMLParser

VOID = {"img", "link", "meta", "br", "col"}


class Read(HTMLParser):
    """A page as a browser's parser meets it: fails on tags that do not balance and on what a page must not have."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.images, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice in {tag}"
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
