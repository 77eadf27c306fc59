"""What is replaced for models that read images, in all processes of verl's and on every platform."""

from verl_tool.platforms.vision.batch_of_text import BATCH_OF_TEXT
from verl_tool.platforms.vision.equal_lengths import EQUAL_LENGTHS
from verl_tool.platforms.vision.packed_images import INPUTS_OF_THE_LOOP, UNPACKED
from verl_tool.platforms.vision.placeholder_ban import PLACEHOLDER_BAN
from verl_tool.platforms.vision.row_images import ROW_IMAGES
from verl_tool.platforms.vision.sent_images import SENT_IMAGES

PATCHES = (ROW_IMAGES, SENT_IMAGES, UNPACKED, INPUTS_OF_THE_LOOP, PLACEHOLDER_BAN, BATCH_OF_TEXT, *EQUAL_LENGTHS)
