"""The command line around a training function."""

import argparse
import sys
from typing import Any, Callable, Dict, Optional, Sequence

from .errors import UserError
from .options import parse_options
from .results import finish, start_log


def run(
    description: str, train: Callable[[argparse.Namespace], Dict[str, Any]], arguments: Optional[Sequence[str]]
) -> int:
    """Options, log, training, figures; bad input is one line on stderr and status 2."""
    try:
        options = parse_options(description, arguments)
        start_log(options)
        finish(train(options), options)
    except (UserError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
