"""Which tile a grouped product runs with: problem, candidates, score; a pure function of sizes.

``problem`` describes a product and a tile, ``candidates`` lists the tiles that fit a machine, ``score`` estimates the
microseconds of each, and ``choice`` takes the best. ``fitted`` holds the constants of the estimates with the
measurements they were fitted to. Nothing depends on data, and the K block is part of the format, so every token count
adds in the same order.
"""
