"""A coordinator of another version: `ELCHE_TEST_VERSIONS` has the oldest and the newest protocol that it speaks."""

import os
import sys

from elche import protocol

protocol.OLDEST, protocol.VERSION = map(int, os.environ["ELCHE_TEST_VERSIONS"].split())

from elche_coordinator.main import main  # noqa: E402

sys.exit(main())
