"""The exception for mistakes that the user can fix."""


class UserError(ValueError):
    """A mistake that the user can fix, with a message of one line.

    The message names the file, key or tensor, and says what was expected and what to do about it. The command line
    prints it after ``error: `` and exits with code 2, without a traceback unless ``--debug`` is given. Bugs of the
    program itself are ordinary exceptions and keep their traceback.
    """
