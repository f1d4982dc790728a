"""A progress that remembers how far it was, and calls back."""

from bellmask.utils.progress import Progress


class Counted(Progress):
    def __init__(self, on_advance=lambda: None):
        self.done, self.seen, self.totals, self.on_advance = 0, [], [], on_advance

    def start(self, total):
        self.totals.append(total)

    def advance(self, count=1, note=""):
        self.done += count
        self.seen.append(self.done)
        self.on_advance()
