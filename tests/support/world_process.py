"""One process of `worlds`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from elche_worker.process.ending import end
from support.worlds import serve

serve()
end(0)  # Python's own way takes 0.2 s of processor
