TAB = "Architecture"


def build(selection):
    pass
