"""Colour maps and line colours, in one place for pictures, terminals and pages.

A map is a table of 256 colours, interpolated in sRGB between published anchors: every fifth entry of viridis, cividis
(arXiv 1712.01662) and twilight as matplotlib has them (within 4 of 255 of its own), and the eleven colours of
ColorBrewer's RdBu, reversed so that red is positive. Lines take the colours of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which people with any common colour blindness tell apart.
"""

from __future__ import annotations

from functools import cache

# On white and on dark grounds alike: the two ends of Okabe and Ito's list, black and yellow, are left out.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

COLOUR_MAPS: dict[str, str] = {
    "RdBu_r": "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f",
    "viridis": (
        "440154 46085c 471063 481769 481d6f 482475 472a7a 46307e 453781 433d84 414287 3f4889 3d4e8a 3a538b 38598c "
        "355e8d 33638d 31688e 2e6d8e 2c718e 2a768e 297b8e 27808e 25848e 23898e 218e8d 20928c 1f978b 1e9c89 1fa188 "
        "21a585 24aa83 28ae80 2eb37c 35b779 3dbc74 46c06f 50c46a 5ac864 65cb5e 70cf57 7cd250 89d548 95d840 a2da37 "
        "b0dd2f bddf26 cae11f d8e219 e5e419 f1e51d fde725"
    ),
    "cividis": (
        "00224e 002656 002a5f 002d68 003070 083370 163770 203a6f 273e6e 2e416d 34456c 3a486c 3f4c6c 444f6c 49536c "
        "4e566c 535a6d 575d6d 5c616e 60646f 656870 696b71 6d6f72 727274 767676 7a7a78 7e7d78 838179 888578 8d8878 "
        "928c78 969077 9b9476 a09875 a59c74 aaa073 afa471 b5a86f baac6d bfb06b c4b468 c9b965 cfbd62 d4c15f dac65b "
        "dfca57 e5cf52 ead34c f0d846 f6dd3f fce236 fee838"
    ),
    "twilight": (
        "e2d9e2 dcd9df d2d5db c5cfd5 b6c8cf a7c0cb 99b8c8 8cafc5 80a5c3 779dc2 6e92c0 6888be 647dbc 6172ba 6067b6 "
        "5f5bb2 5e4fac 5e43a5 5c389d 5a2b90 562182 4f1972 471461 3f1251 371144 32123a 331237 3a113a 43123e 4f1444 "
        "5c1749 691a4d 761f4f 832550 8e2c50 983550 a03e50 a94950 b15452 b75f55 bc6b59 c1775f c58468 c89073 ca9c80 "
        "cda88f d1b4a0 d5bfb1 d9c9c2 ddd1d1 e0d7db e2d9e2"
    ),
}


@cache
def colour_table(name: str) -> bytes:
    """256 colours, three bytes each: red, green, blue. KeyError for an unknown map."""
    anchors = [bytes.fromhex(anchor) for anchor in COLOUR_MAPS[name].split()]
    table = bytearray()
    for index in range(256):
        place = index / 255 * (len(anchors) - 1)
        left = min(int(place), len(anchors) - 2)
        share = place - left
        ends = zip(anchors[left], anchors[left + 1], strict=True)
        table.extend(round(low + share * (high - low)) for low, high in ends)
    return bytes(table)


def colour_at(name: str, share: float) -> tuple[int, int, int]:
    """The colour at a share of the map's way from low (0) to high (1); beyond, the end's."""
    index = 3 * round(255 * min(max(share, 0.0), 1.0))
    red, green, blue = colour_table(name)[index : index + 3]
    return red, green, blue
