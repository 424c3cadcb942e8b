"""The one kind of error that is meant for the person at the keyboard."""


class UserError(ValueError):
    """A fault that the person can mend, told in one line.

    The message names the file, key or tensor, says what was expected and what to do about it. The command line
    prints it after ``error: `` and exits with code 2, without a traceback unless ``--debug`` is given. Faults of
    the program itself are ordinary exceptions and keep their traceback.
    """
