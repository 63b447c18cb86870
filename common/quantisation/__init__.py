"""Quantisation in blocks: int8 and int4 for what travels, int8 and nf4 for frozen weights."""

from common.quantisation.blockwise import dequantise as dequantise
from common.quantisation.blockwise import quantise as quantise
from common.quantisation.layout import BLOCK as BLOCK
from common.quantisation.layout import Bits as Bits
from common.quantisation.layout import quantised_nbytes as quantised_nbytes
from common.quantisation.nf4 import NF4_BLOCK as NF4_BLOCK
from common.quantisation.nf4 import NF4_VALUES as NF4_VALUES
from common.quantisation.nf4 import dequantise_nf4 as dequantise_nf4
from common.quantisation.nf4 import nf4_nbytes as nf4_nbytes
from common.quantisation.nf4 import quantise_nf4 as quantise_nf4
