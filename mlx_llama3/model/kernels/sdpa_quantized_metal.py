"""Metal source of `sdpa_quantized`: the bodies of its two kernels, without the constants."""

# A team of LANES threads reads one position: each thread has 8 numbers of its key and 8 of its value. A simdgroup has
# several teams, so it reads several positions at once. Each thread serves HELD query rows with what it reads. SPLITS
# simdgroups share the positions; if there are more query rows than HELD, further simdgroups take the other rows.
#
# A thread has 4 key numbers of each half of the head, so that neighbouring threads read neighbouring words; so too for
# values of 8 bits. For values of 4 bits it has one word, 8 consecutive numbers. `records` are the packed positions.
ATTEND = """
    const uint block = threadgroup_position_in_grid.x;
    const uint blocks = threadgroups_per_grid.x;
    const uint kv_head = threadgroup_position_in_grid.y;
    const uint b = threadgroup_position_in_grid.z;
    const uint lane = thread_index_in_simdgroup;
    const uint simdgroup = simdgroup_index_in_threadgroup;
    const uint part = lane % LANES;
    const uint team = lane / LANES;
    const uint split = simdgroup % SPLITS;
    const uint first_row = simdgroup / SPLITS * HELD;
    constexpr uint TEAMS = 32 / LANES;
    constexpr float LOWEST = -3.0e38f;

    uint key_at[8];
    uint value_at[8];
    for (uint i = 0; i < 8; i++) {
        key_at[i] = 4 * part + (i < 4 ? i : D / 2 + i - 4);
        value_at[i] = VALUE_BITS == 8 ? key_at[i] : 8 * part + i;
    }

    float query[HELD][8];
    float sum[HELD][8];  // weights times values, relative to the largest score so far
    float largest[HELD];
    float total[HELD];  // sum of the weights
#pragma clang loop unroll(full)
    for (uint j = 0; j < HELD; j++) {
        const uint row = metal::min(first_row + j, ROWS - 1);
        const uint head = kv_head * GROUP + row / S;
        const device T* from = q + b * q_strides[0] + head * q_strides[1] + row % S * q_strides[2];
        for (uint i = 0; i < 8; i++) {
            query[j][i] = float(from[key_at[i] * q_strides[3]]) * FACTOR;
            sum[j][i] = 0;
        }
        largest[j] = LOWEST;
        total[j] = 0;
    }

    const uint n_dense = lengths[0];
    const uint positions = n_dense + lengths[1];
    const device T* dense_keys = dense + b * dense_strides[1] + kv_head * dense_strides[2];
    const device T* dense_values = dense_keys + dense_strides[0];
    const uint dense_step = dense_strides[3];
    const device uint* head_records = records + b * records_strides[0] + kv_head * records_strides[1];
    const uint record_step = records_strides[2];

    for (uint start = (block * SPLITS + split) * TEAMS; start < positions; start += blocks * SPLITS * TEAMS) {
        const uint position = start + team;
        float key[8];
        float value[8];
        if (position < n_dense) {
            const uint at = position * dense_step;
            for (uint i = 0; i < 8; i++) {
                key[i] = float(dense_keys[at + key_at[i]]);
                value[i] = float(dense_values[at + value_at[i]]);
            }
        } else if (position < positions) {
            const device uint* record = head_records + (position - n_dense) * record_step;
            const device uint* values = record + KEY_WORDS;
            const device uint* key_pairs = values + VALUE_WORDS;
            const device uint* value_pairs = key_pairs + KEY_GROUPS;
            for (uint w = 0; w < 2; w++) {  // one word of each half
                const uint word = record[part + w * LANES];
                const uint pair = key_pairs[w * (KEY_GROUPS - 1)];
                const float scale = float(as_type<half>(ushort(pair)));
                const float bias = float(as_type<half>(ushort(pair >> 16)));
                for (uint i = 0; i < 4; i++) {
                    key[4 * w + i] = scale * float((word >> (8 * i)) & 255u) + bias;
                }
            }
            constexpr uint VALUES_A_WORD = 32 / VALUE_BITS;
            for (uint w = 0; w < 8 / VALUES_A_WORD; w++) {
                const uint word = values[part + w * LANES];
                const uint pair = value_pairs[VALUE_BITS == 8 ? w * (VALUE_GROUPS - 1) : part / 4];
                const float scale = float(as_type<half>(ushort(pair)));
                const float bias = float(as_type<half>(ushort(pair >> 16)));
                for (uint i = 0; i < VALUES_A_WORD; i++) {
                    const uint number = (word >> (VALUE_BITS * i)) & ((1u << VALUE_BITS) - 1);
                    value[VALUES_A_WORD * w + i] = scale * float(number) + bias;
                }
            }
        } else {
            for (uint i = 0; i < 8; i++) {
                key[i] = 0;
                value[i] = 0;
            }
        }

#pragma clang loop unroll(full)
        for (uint j = 0; j < HELD; j++) {
            float score = 0;
            for (uint i = 0; i < 8; i++) {
                score += query[j][i] * key[i];
            }
            for (uint step = 1; step < LANES; step *= 2) {
                score += simd_shuffle_xor(score, ushort(step));
            }
            // Causal mask: the newest S positions are the last dense ones; a row sees none after its own.
            const uint later = S - 1 - metal::min(first_row + j, ROWS - 1) % S;
            const bool seen = position < n_dense ? position + later < n_dense : position < positions;
            const float peak = seen ? metal::max(largest[j], score) : largest[j];
            const float fade = metal::fast::exp2(largest[j] - peak);
            const float weight = seen ? metal::fast::exp2(score - peak) : 0.0f;
            largest[j] = peak;
            total[j] = total[j] * fade + weight;
            for (uint i = 0; i < 8; i++) {
                sum[j][i] = sum[j][i] * fade + weight * value[i];
            }
        }
    }

    // Combine the teams of a simdgroup.
#pragma clang loop unroll(full)
    for (uint j = 0; j < HELD; j++) {
        for (uint step = LANES; step < 32; step *= 2) {
            const float peak = metal::max(largest[j], simd_shuffle_xor(largest[j], ushort(step)));
            const float fade = metal::fast::exp2(largest[j] - peak);
            largest[j] = peak;
            total[j] *= fade;
            total[j] += simd_shuffle_xor(total[j], ushort(step));
            for (uint i = 0; i < 8; i++) {
                sum[j][i] *= fade;
                sum[j][i] += simd_shuffle_xor(sum[j][i], ushort(step));
            }
        }
    }

    // Combine the simdgroups that hold the same rows.
    threadgroup float peaks[SIMDGROUPS * HELD];
    threadgroup float totals[SIMDGROUPS * HELD];
    threadgroup float sums[SIMDGROUPS * D];
    if (lane == 0) {
#pragma clang loop unroll(full)
        for (uint j = 0; j < HELD; j++) {
            peaks[simdgroup * HELD + j] = largest[j];
            totals[simdgroup * HELD + j] = total[j];
        }
    }
    const uint first = simdgroup - split;
#pragma clang loop unroll(full)
    for (uint j = 0; j < HELD; j++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint other = (first + lane % SPLITS) * HELD + j;
        const float peak = simd_max(peaks[other]);
        const float whole = simd_sum(lane < SPLITS ? totals[other] * metal::fast::exp2(peaks[other] - peak) : 0.0f);
        const float fade = metal::fast::exp2(largest[j] - peak);
        if (team == 0) {
            for (uint i = 0; i < 8; i++) {
                sums[simdgroup * D + value_at[i]] = sum[j][i] * fade;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (first_row + j < ROWS) {
            const uint row = (b * threadgroups_per_grid.y + kv_head) * ROWS + first_row + j;
            for (uint i = split * 32 + lane; i < D; i += SPLITS * 32) {
                float added = 0;
                for (uint k = 0; k < SPLITS; k++) {
                    added += sums[(first + k) * D + i];
                }
                STORE
            }
        }
    }
"""

STORE_OUTPUT = "out[row * D + i] = T(added / whole);"

# The result of one block of positions: the weighted sums, the largest score, the sum of the weights.
STORE_PART = """
                device float* to = out + (row * blocks + block) * (D + 2);
                to[i] = added;
                if (i == 0) {
                    to[D] = peak;
                    to[D + 1] = whole;
                }
"""

# Second kernel: one threadgroup for each query row; REDUCERS threads share one number of its output.
REDUCE = """
    const uint row = threadgroup_position_in_grid.x;
    const uint lane = thread_index_in_simdgroup;
    const uint i = thread_position_in_threadgroup.x % D;
    const uint share = thread_position_in_threadgroup.x / D;
    const uint blocks = parts_shape[1];
    const device float* from = parts + row * blocks * (D + 2);
    constexpr float LOWEST = -3.0e38f;

    float peak = LOWEST;
    for (uint block = lane; block < blocks; block += 32) {
        peak = metal::max(peak, from[block * (D + 2) + D]);
    }
    peak = simd_max(peak);
    float whole = 0;
    for (uint block = lane; block < blocks; block += 32) {
        whole += from[block * (D + 2) + D + 1] * metal::fast::exp2(from[block * (D + 2) + D] - peak);
    }
    whole = simd_sum(whole);

    float added = 0;
    for (uint block = share; block < blocks; block += REDUCERS) {
        added += from[block * (D + 2) + i] * metal::fast::exp2(from[block * (D + 2) + D] - peak);
    }
    threadgroup float sums[REDUCERS * D];
    sums[share * D + i] = added;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (share == 0) {
        for (uint k = 1; k < REDUCERS; k++) {
            added += sums[k * D + i];
        }
        out[row * D + i] = T(added / whole);
    }
"""
