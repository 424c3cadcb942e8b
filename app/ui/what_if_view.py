TAB = "What if"


def build(selection):
    pass
