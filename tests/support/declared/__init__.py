"""Encoders of all kinds, declared: a test for each line of docs/declarations.md."""

from tests.support.declared.diffusion import DIFFUSION
from tests.support.declared.images import IMAGES
from tests.support.declared.packed_images import PACKED_IMAGES
from tests.support.declared.points import POINTS
from tests.support.declared.sounds import SOUNDS
from tests.support.declared.texts import TEXTS

DECLARED = IMAGES | PACKED_IMAGES | POINTS | TEXTS | SOUNDS | DIFFUSION
