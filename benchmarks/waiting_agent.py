"""An agent of TURNS model calls that waits between them, as tools do: TURNS MEAN_S SEED.

Waits are exponential, at most five times their mean. The agent takes little of the machine.
"""

import os
import random
import sys
import time

from light_agent import ask

turns, mean_s = int(sys.argv[1]), float(sys.argv[2])
drawn = random.Random(int(sys.argv[3]) + os.getpid())  # noqa: S311 - waits
messages = [{"role": "user", "content": "which number does each file hold?"}]
for turn in range(turns):
    messages += [ask(messages), {"role": "user", "content": f"file {turn} holds {turn * 7}"}]
    time.sleep(min(drawn.expovariate(1 / mean_s), 5 * mean_s))
