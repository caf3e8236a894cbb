"A book that runs: paged attention, block by block, and the small server that it builds."
__version__ = "0.0.1"
