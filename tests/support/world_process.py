"""One process of `worlds`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from support.worlds import serve

serve()
