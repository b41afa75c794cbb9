"""Python imports this module at its start: the processes that a test starts are traced, too."""

import tracer

tracer.start()
