TAB = "Traces"


def build(selection):
    pass
