"""Numbers that the host and kernels have in common: kinds of weights, scales and results, and words of a peer's head.

Plain integers, without Triton: the host passes them as they are, and kernels wrap the ones they compare in
``tl.constexpr``, which makes them part of what is compiled.
"""

__all__ = [
    "BLOCK_SCALE",
    "E2M1_E4M3",
    "E2M1_E8M0",
    "E2M1_LANES",
    "E2M1_SCALED",
    "E4M3_E4M3",
    "E4M3_LANES",
    "E4M3_SCALE",
    "E8M0_SCALE",
    "FAST_MATH",
    "FAULT_GAVE_UP",
    "FAULT_LATE",
    "FAULT_OTHER_CALL",
    "GROUP_CODES",
    "GROUP_SCALE",
    "HALF_SCALE",
    "HEAD_BYTES",
    "HEAD_CLOCK",
    "HEAD_COLLECT_FAILED",
    "HEAD_EPOCH",
    "HEAD_POSTS",
    "HEAD_PULL_FAILED",
    "HEAD_ROWS",
    "HEAD_STATUS",
    "HEAD_TICKET",
    "INT4_FLOAT",
    "INT4_FLOATS",
    "INT4_LANES",
    "INT4_PAIRS",
    "INT8_LANES",
    "MAX_PEERS",
    "MINIMUM_STEPS",
    "NOWHERE",
    "NO_ACTIVATION",
    "NO_SCALE",
    "PAIR_SCALE",
    "PHASE_COMBINE",
    "PHASE_COMPUTE",
    "PHASE_PUBLISH",
    "PLAIN",
    "POWER_CODES",
    "ROWS",
    "SHIFTED_STEPS",
    "SIGNED_STEPS",
    "STEP_SCALE",
    "TABLE_LANES",
    "TERNARY_SCALE",
    "THREE_BIT_LANES",
    "TWO_BIT_LANES",
    "X_BLOCK_SCALE",
    "X_BLOCK_SCALE_TRANSPOSED",
    "X_ROW_SCALE",
    "X_UNSCALED",
    "ZERO_SCALE",
]

# OperandFormat.weight: how weights are stored and reach the tensor core, in grouped_gemm.py.
PLAIN = 0  # in the dtype of the activations
E4M3_LANES = 1  # lanes of two E4M3 codes, decoded to bfloat16
E4M3_E4M3 = 2  # E4M3 on both sides
E2M1_LANES = 3  # lanes of four E2M1 codes, decoded to bfloat16
INT4_LANES = 4  # lanes of four codes 0..15, decoded to the dtype of the rows
INT8_LANES = 5  # lanes of two codes 0..255, decoded to the dtype of the rows
# The same in w4a8.py: which four-bit codes its words hold.
E2M1_E8M0 = 6  # E2M1, groups of 32 with a power of two
INT4_FLOAT = 7  # two's complement, one float32 for each row and K block, applied to the product
E2M1_E4M3 = 8  # E2M1, groups of 16 with an E4M3 scale: two operands whose sum is exact
# Not words but pairs of neighbours, E2M1 with E8M0 bytes: the tensor core of sm_100 decodes and scales them itself.
E2M1_SCALED = 9
# Two's complement in words of one quarter of the K block, whose product is scaled by itself.
INT4_PAIRS = 10  # two words of a row and K block, two bfloat16 scales each
INT4_FLOATS = 11  # four float32 scales

# Lanes as those of INT4, whose codes look numbers up; in grouped_gemm.py.
TABLE_LANES = 12

# Lanes of codes of two and of three bits, each with a multiplier of 16 columns; in low_bits.py.
TWO_BIT_LANES = 13
THREE_BIT_LANES = 14

# OperandFormat.scale: which one is applied inside the K loop. Each is loaded as 32-bit words: smaller loads are not
# prefetched.
NO_SCALE = 0
BLOCK_SCALE = 1  # float32 for each 128 rows and K block, applied to the product
E8M0_SCALE = 2  # four bytes of one row and K block, a byte a quarter, applied to the operand
E4M3_SCALE = 3  # the same with E4M3 bytes
GROUP_SCALE = 4  # float32 for each row and K block, half or quarter of it, applied to the product
PAIR_SCALE = 5  # two bfloat16 a word for each row and quarter, applied to the product
ZERO_SCALE = 6  # GROUP_SCALE whose low byte, which such a float32 does not need, is the zero point
HALF_SCALE = 7  # float16 for each row and quarter, two a word; with four words each has a minimum above it
STEP_SCALE = 8  # a word of one or two float16, a word of a signed byte a quarter that multiplies the first, and with
# three words such bytes, without a sign, for the second, a minimum; codes with minima are taken as they are
# Scales of the lanes of low_bits.py: but for TERNARY_SCALE four words of a byte for each 16 columns, and the float16 of
# 256 columns.
TERNARY_SCALE = 9  # no byte: codes stand for -1, 0 and 1
MINIMUM_STEPS = 10  # a step and the step of a minimum, four bits each; above the float16, in bfloat16, their ratio
SHIFTED_STEPS = 11  # a step of four bits, then a bit for each eight columns: subtract 9/8 instead of 7/8 steps
SIGNED_STEPS = 12  # a step plus 32

# OperandFormat.x_scale: how the rows of activations are scaled, each with float32 numbers.
X_UNSCALED = 0
X_BLOCK_SCALE = 1  # for each row and K block, [rows, K blocks]
X_ROW_SCALE = 2  # for each row, [rows, 1]
X_BLOCK_SCALE_TRANSPOSED = 3  # as X_BLOCK_SCALE for rows in order, [K blocks, rows]

# Projections.activation, where none follows; the others are positions in types.ACTIVATION_KINDS, plus FAST_MATH for
# the GPU's approximation of tanh.
NO_ACTIVATION = -1
FAST_MATH = 16

# The place of a row that is nobody's. A peer's memory may come before this rank's: other places are negative too.
NOWHERE = -(1 << 62)

# CODES: how prefill.cu stores its result.
ROWS = 0  # as it is
GROUP_CODES = 1  # E4M3 codes with a scale for each 128 columns
POWER_CODES = 2  # the same with scales that are powers of two

# PHASE: of mega_kernel, in order.
PHASE_PUBLISH = 1  # peers may read the tokens of this rank
PHASE_COMPUTE = 2  # tokens are pulled and multiplied, and rows stored in the memory of their tokens' ranks
PHASE_COMBINE = 3  # rows are summed

# HEAD: the 64-bit words in front of a rank's symmetric memory, in peer.py and mega.py on the device and in
# parallel/peers_in_torch.py on the host.
HEAD_BYTES = 2048
MAX_PEERS = 64
HEAD_POSTS = 0  # a flag of each peer: its tokens can be read
HEAD_ROWS = 64  # a flag of each peer: its rows can be read
HEAD_EPOCH = 128  # of the current pass, -1 once the rank has given up
HEAD_TICKET = 129
HEAD_CLOCK = 130
HEAD_PULL_FAILED = 131
HEAD_COLLECT_FAILED = 132
HEAD_STATUS = 133  # three words: code, flag seen, flag expected

# FAULT: the lowest byte of the code in HEAD_STATUS; above it the word of the phase that failed, then the peer.
FAULT_LATE = 1
FAULT_OTHER_CALL = 2
FAULT_GAVE_UP = 3
