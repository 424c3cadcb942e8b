"""`python -m mlx_llama3`: the program, as the command `mlx-llama3` starts it."""

import sys

from mlx_llama3_main import main

sys.exit(main())
