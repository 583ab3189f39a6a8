"""Rows of several files as loops over NumPy arrays, for Numba.

Each is what a user of Numba writes for the task: the algorithm of the row in C, without
vectors and masks by hand, which Numba does not have, and with `prange` where the C has
threads for a loop that is long.
"""

import math
from typing import Any

import numpy as np
from numba import get_num_threads, njit, prange


@njit
def row_while(n: Any) -> Any:
    trips, x = 0, np.float32(0.0)
    while trips < n.item():
        x = x * np.float32(0.999) + np.float32(1.0)
        trips += 1
    return trips, x


@njit
def row_fori_cond(n: Any) -> Any:
    x = np.float32(1.0)
    for i in range(n.item()):
        if i % 3 == 0:
            x *= np.float32(1.0001)
        else:
            x += np.float32(0.5)
    return x


@njit
def _lorenz_slope(x: Any, y: Any, z: Any) -> Any:
    return 10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z


@njit
def row_lorenz(start: Any, steps: Any) -> Any:
    h = 0.01
    out = np.empty((steps, 3))
    x, y, z = start[0], start[1], start[2]
    for t in range(steps):
        a, b, c = _lorenz_slope(x, y, z)
        d, e, f = _lorenz_slope(x + h / 2 * a, y + h / 2 * b, z + h / 2 * c)
        p, q, r = _lorenz_slope(x + h / 2 * d, y + h / 2 * e, z + h / 2 * f)
        u, v, w = _lorenz_slope(x + h * p, y + h * q, z + h * r)
        x += h / 6 * (a + 2 * d + 2 * p + u)
        y += h / 6 * (b + 2 * e + 2 * q + v)
        z += h / 6 * (c + 2 * f + 2 * r + w)
        out[t, 0], out[t, 1], out[t, 2] = x, y, z
    return out


def _collatz(numbers: Any) -> Any:
    out = np.empty_like(numbers)
    for i in prange(numbers.size):
        n, k = numbers[i], 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            k += 1
        out[i] = k
    return out


def _escape(cx: Any, cy: Any) -> Any:
    kind = cx.dtype.type
    out = np.empty(cx.size, np.int64)
    for i in prange(cx.size):
        x, y, k = kind(0), kind(0), 0
        while x * x + y * y < kind(4) and k < 256:
            x, y = x * x - y * y + cx[i], kind(2) * x * y + cy[i]
            k += 1
        out[i] = k
    return out


row_collatz = njit(parallel=True)(_collatz)
row_mandelbrot = njit(parallel=True)(_escape)


@njit
def row_in_place(x: Any, steps: Any) -> Any:
    out = x.copy()
    for i in range(steps):
        out[i % 1000] = out[(i + 1) % 1000] * np.float32(0.5) + np.float32(1.0)
    return out


@njit(parallel=True)
def row_tanh_scan(x: Any) -> Any:
    n, block = x.size, 4096
    out = x.copy()
    for k in prange((n + block - 1) // block):
        for _ in range(100):
            for i in range(k * block, min((k + 1) * block, n)):
                out[i] = np.tanh(out[i])
    return out


@njit
def row_recurrence_scan(decay: Any, drive: Any) -> Any:
    out = np.empty_like(drive)
    h = np.float32(0.0)
    for i in range(drive.size):
        h = decay[i] * h + drive[i]
        out[i] = h
    return out


def _root(numbers: Any) -> Any:
    kind = numbers.dtype.type
    eps = kind(4) * np.finfo(numbers.dtype).eps
    out = np.empty_like(numbers)
    for i in prange(numbers.size):
        x, old, k = numbers[i], kind(0), 0
        while abs(x - old) > eps * x and k < 100:
            x, old = (kind(2) * x + numbers[i] / (x * x)) / kind(3), x
            k += 1
        out[i] = x
    return out


@njit
def _orbit_slope(x: Any, v: Any) -> Any:
    kind = type(x)
    return v, kind(2) * (kind(1) - x * x) * v - x


def _orbit(places: Any, speeds: Any) -> Any:
    kind = places.dtype.type
    half, three_quarters, part = kind(0.5), kind(0.75), kind(-5 / 72)
    two, three, four, five = kind(2), kind(3), kind(4), kind(5)
    out = np.empty_like(places)
    for i in prange(places.size):
        t, x, v, h, k = kind(0), places[i], speeds[i], kind(0.01), 0
        while t < five and k < 1000:
            a, b = _orbit_slope(x, v)
            c, d = _orbit_slope(x + h * a * half, v + h * b * half)
            p, q = _orbit_slope(x + h * c * three_quarters, v + h * d * three_quarters)
            new_x = x + h * (two * a + three * c + four * p) / kind(9)
            new_v = v + h * (two * b + three * d + four * q) / kind(9)
            r, s = _orbit_slope(new_x, new_v)
            off_x = h * (a * part + c / kind(12) + p / kind(9) - r / kind(8))
            off_v = h * (b * part + d / kind(12) + q / kind(9) - s / kind(8))
            error = np.sqrt(off_x * off_x + off_v * off_v) * kind(1e4) + kind(1e-8)
            factor = kind(0.9) * np.exp(np.log(error) / -three)
            longer = h * min(max(factor, kind(0.2)), five)
            if error < kind(1):
                t, x, v = t + h, new_x, new_v
            h = min(longer, max(five - t, kind(1e-6)))
            k += 1
        out[i] = x
    return out


def _search(wanted: Any, table: Any) -> Any:
    out = np.empty(wanted.size, np.int64)
    for i in prange(wanted.size):
        low, high = 0, table.size
        while low < high:
            middle = (low + high) // 2
            if table[middle] < wanted[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low
    return out


def _walk(seeds: Any, starts: Any) -> Any:
    kind = starts.dtype.type
    out = np.empty(seeds.size, np.int64)
    for i in prange(seeds.size):
        state, x, k = seeds[i], starts[i], 0
        while abs(x) < kind(4) and k < 2000:
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            uniform = kind(np.int64(state >> np.uint64(40))) * kind(2.0**-24)
            x += uniform * kind(2) - kind(1)
            k += 1
        out[i] = k
    return out


row_gang_collatz = njit(parallel=True)(_collatz)
row_gang_escape_f32 = njit(parallel=True)(_escape)
row_gang_escape_f64 = row_gang_escape_f32
row_gang_root_f32 = njit(parallel=True)(_root)
row_gang_root_f64 = row_gang_root_f32
row_gang_orbit_f32 = njit(parallel=True)(_orbit)
row_gang_orbit_f64 = row_gang_orbit_f32
row_gang_search_f32 = njit(parallel=True)(_search)
row_gang_search_f64 = row_gang_search_f32
row_gang_walk_f32 = njit(parallel=True)(_walk)
row_gang_walk_f64 = row_gang_walk_f32


@njit(parallel=True)
def row_heat_slices(start: Any, steps: Any) -> Any:
    n, m = start.shape
    u, new = start.copy(), start.copy()  # the edges stay as they are in both
    for _ in range(steps):
        for i in prange(1, n - 1):
            for j in range(1, m - 1):
                around = u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]
                new[i, j] = u[i, j] + 0.1 * (around - 4.0 * u[i, j])
        u, new = new, u
    return u


@njit
def _waved(u: Any, old: Any, around: Any) -> Any:
    return 2.0 * u - old + 0.2 * (around - 4.0 * u)


@njit(parallel=True)
def row_waves(before: Any, start: Any, steps: Any) -> Any:
    """A new field takes the memory of the one before the last."""
    n, m = start.shape
    old, u = before.copy(), start.copy()
    for _ in range(steps):
        for i in prange(n):
            up, at, down = u[(i + n - 1) % n], u[i], u[(i + 1) % n]
            to = old[i]
            e = m - 1
            to[0] = _waved(at[0], to[0], up[0] + down[0] + at[e] + at[1 % m])
            for j in range(1, e):
                around = up[j] + down[j] + at[j - 1] + at[j + 1]
                to[j] = _waved(at[j], to[j], around)
            to[e] = _waved(at[e], to[e], up[e] + down[e] + at[e - 1] + at[0])
        old, u = u, old
    return u


@njit(parallel=True)
def row_life(start: Any, steps: Any) -> Any:
    n, m = start.shape
    u, new = start.copy(), np.empty_like(start)
    for _ in range(steps):
        for i in prange(n):
            up, at, down = u[(i + n - 1) % n], u[i], u[(i + 1) % n]
            sums = np.empty(m + 2, np.int8)  # of columns; the ends once more
            for j in range(m):
                sums[j + 1] = up[j] + at[j] + down[j]
            sums[0], sums[m + 1] = sums[m], sums[1]
            for j in range(m):
                count = np.int8(sums[j] + sums[j + 1] + sums[j + 2])
                new[i, j] = (count == 3) | ((at[j] == 1) & (count == 4))
        u, new = new, u
    return u


@njit
def row_edit_distance_scan(a: Any, b: Any) -> Any:
    row = np.arange(b.size + 1)
    for i in range(a.size):
        corner = row[0]
        row[0] += 1
        left = row[0]
        for j in range(b.size):
            up = row[j + 1]
            left = min(left + 1, min(up + 1, corner + (a[i] != b[j])))
            row[j + 1] = left
            corner = up
    return row[b.size]


@njit
def row_lcs_at(a: Any, b: Any) -> Any:
    table = np.zeros((a.size + 1, b.size + 1), np.int32)
    for i in range(a.size):
        for j in range(b.size):
            if a[i] == b[j]:
                table[i + 1, j + 1] = table[i, j] + 1
            else:
                table[i + 1, j + 1] = max(table[i, j + 1], table[i + 1, j])
    return table[a.size, b.size]


@njit
def row_knapsack(weights: Any, values: Any, capacity: Any) -> Any:
    n = capacity.size
    best, new = capacity.copy(), np.empty_like(capacity)
    for k in range(weights.size):
        weight, value = min(weights[k], n), values[k]
        new[:weight] = best[:weight]
        without, to = best[weight:], new[weight:]
        for j in range(n - weight):
            to[j] = max(without[j], best[j] + value)
        best, new = new, best
    return best


@njit
def row_floyd_warshall(start: Any) -> Any:
    """Without threads: a step is too short to share."""
    n = len(start)
    d = start.copy()
    for k in range(n):
        through = d[k].copy()
        for i in range(n):
            first = d[i, k]
            for j in range(n):
                d[i, j] = min(d[i, j], first + through[j])
    return d


@njit
def row_viterbi(scores: Any, moves: Any) -> Any:
    n, states = scores.shape
    pointers = np.empty((n, states), np.int32)
    best, most = scores[0].copy(), np.empty_like(scores[0])
    for t in range(1, n):
        origin = pointers[t - 1]
        for j in range(states):
            most[j] = best[0] + moves[0, j]
            origin[j] = 0
        for i in range(1, states):
            for j in range(states):
                total = best[i] + moves[i, j]
                is_more = total > most[j]
                origin[j] = np.int32(i) if is_more else origin[j]
                most[j] = total if is_more else most[j]
        for j in range(states):
            best[j] = most[j] + scores[t, j]
    out = np.empty(n - 1, np.int64)
    state = np.argmax(best)
    for t in range(n - 2, -1, -1):
        out[t] = state
        state = pointers[t, state]
    return out


@njit
def _median_of_three(a: Any, b: Any, c: Any) -> Any:
    return max(min(a, b), min(max(a, b), c))


@njit
def _median_of_five(a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    low, high = max(min(a, b), min(c, d)), min(max(a, b), max(c, d))
    return _median_of_three(low, high, e)


@njit(parallel=True)
def row_median_filter(x: Any) -> Any:
    n = x.size
    out = np.empty_like(x)
    a, b, c, d, e = x[:-4], x[1:-3], x[2:-2], x[3:-1], x[4:]
    middle = out[2:-2]
    for i in prange(n - 4):  # whose index cannot be negative: it is not tested
        middle[i] = _median_of_five(a[i], b[i], c[i], d[i], e[i])
    for i in range(n):
        if 2 <= i < n - 2:
            continue
        first, last = max(i - 1, 0), min(i + 1, n - 1)
        before, after = max(i - 2, 0), min(i + 2, n - 1)
        out[i] = _median_of_five(x[before], x[first], x[i], x[last], x[after])
    return out


@njit(parallel=True)
def row_histogram(x: Any) -> Any:
    n, parts = x.size, get_num_threads()
    counts = np.zeros((parts, 256), np.int32)
    for part in prange(parts):
        own = counts[part]
        for i in range(n * part // parts, n * (part + 1) // parts):
            own[int(min(max((x[i] + 4.0) * 32.0, 0.0), 255.0))] += 1
    out = np.zeros(256, np.int32)
    for part in range(parts):
        for k in range(256):
            out[k] += counts[part, k]
    return out


@njit(parallel=True)
def row_nearest(queries: Any, points: Any) -> Any:
    m = len(points)
    xs, ys, zs = points[:, 0].copy(), points[:, 1].copy(), points[:, 2].copy()
    out = np.empty(len(queries), np.int64)
    for i in prange(len(queries)):
        p, q, r = queries[i, 0], queries[i, 1], queries[i, 2]
        apart = np.empty(m)
        for j in range(m):
            x, y, z = p - xs[j], q - ys[j], r - zs[j]
            apart[j] = x * x + y * y + z * z
        at = 0
        for j in range(1, m):
            if apart[j] < apart[at]:
                at = j
        out[i] = at
    return out


@njit
def row_running_max(changes: Any) -> Any:
    total = most = fall = 0.0
    for i in range(changes.size):
        total += changes[i]
        most = max(most, total)
        fall = max(fall, most - total)
    return fall


@njit
def row_spmv(heads: Any, tails: Any, values: Any, x: Any) -> Any:
    out = np.zeros_like(x)
    for e in range(heads.size):
        out[heads[e]] += values[e] * x[tails[e]]
    return out


@njit
def row_pagerank(heads: Any, tails: Any, degrees: Any, steps: Any) -> Any:
    n = degrees.size
    rank, shares, flow = np.full(n, 1.0 / n), np.empty(n), np.empty(n)
    for _ in range(steps):
        for i in range(n):
            shares[i] = rank[i] / degrees[i]
            flow[i] = 0.0
        for e in range(heads.size):
            flow[heads[e]] += shares[tails[e]]
        for i in range(n):
            rank[i] = 0.15 / n + 0.85 * flow[i]
    return rank


@njit(parallel=True)
def row_message_passing(heads: Any, tails: Any, features: Any, weight: Any) -> Any:
    nodes, width = features.shape
    sums, out = np.zeros_like(features), np.zeros_like(features)
    for e in range(heads.size):
        head, tail = heads[e], tails[e]
        for k in range(width):
            sums[head, k] += features[tail, k]
    for i in prange(nodes):
        for k in range(width):
            for j in range(width):
                out[i, j] += sums[i, k] * weight[k, j]
        for j in range(width):
            out[i, j] = np.tanh(out[i, j])
    return out


@njit
def row_components(heads: Any, tails: Any, own: Any) -> Any:
    label, old = own.copy(), np.empty_like(own)
    changes, k = True, 0
    while changes and k < 50:
        old[:] = label
        for e in range(heads.size):
            label[heads[e]] = min(label[heads[e]], old[tails[e]])
        for e in range(heads.size):
            label[tails[e]] = min(label[tails[e]], old[heads[e]])
        changes = False
        for i in range(label.size):
            changes |= label[i] != old[i]
        k += 1
    return label


@njit
def row_ode_adaptive(start: Any) -> Any:
    t, x, v, h, k = 0.0, start[0], start[1], 1e-3, 0
    while t < 20.0 and k < 100_000:
        a, b = v, 5.0 * (1.0 - x * x) * v - x
        p, q = x + h * a, v + h * b
        c, d = q, 5.0 * (1.0 - p * p) * q - p
        error = max(abs(h * (c - a) * 0.5), abs(h * (d - b) * 0.5)) * 1e4 + 1e-8
        factor = min(max(0.9 / math.sqrt(error), 0.2), 5.0)
        if error < 1.0:
            x += h * (a + c) * 0.5
            v += h * (b + d) * 0.5
            t += h
        h = min(h * factor, 20.0 - t + 1e-9)
        k += 1
    return np.array([x, v])


@njit
def row_pendulum(start: Any, steps: Any) -> Any:
    out = np.empty((steps, 2))
    place, speed = start[0], start[1]
    for t in range(steps):
        half = speed - 0.005 * math.sin(place)
        place += 0.01 * half
        speed = half - 0.005 * math.sin(place)
        out[t, 0], out[t, 1] = place, speed
    return out


@njit(error_model="numpy")
def _ratio(a: Any, b: Any) -> Any:
    """Without a test for zero, which would keep loops from vectors."""
    return a / b


@njit
def row_n_body(places: Any, speeds: Any, masses: Any, steps: Any) -> Any:
    """The inner loop is over the bodies that are pulled: sums of floats over an inner
    loop get no vectors. Without threads: a step is too short to share."""
    n = len(places)
    x, y, z = places[:, 0].copy(), places[:, 1].copy(), places[:, 2].copy()
    u, v, w = speeds[:, 0].copy(), speeds[:, 1].copy(), speeds[:, 2].copy()
    for _ in range(steps):
        for j in range(n):
            from_x, from_y, from_z, mass = x[j], y[j], z[j], 0.001 * masses[j]
            for i in range(n):
                a, b, c = from_x - x[i], from_y - y[i], from_z - z[i]
                square = a * a + b * b + c * c + 0.01
                pull = _ratio(mass, square * math.sqrt(square))
                u[i] += a * pull
                v[i] += b * pull
                w[i] += c * pull
        for i in range(n):
            x[i] += 0.001 * u[i]
            y[i] += 0.001 * v[i]
            z[i] += 0.001 * w[i]
    return np.stack((x, y, z), axis=1)


@njit
def row_kalman(seen: Any) -> Any:
    n = len(seen)
    out = np.empty((n, 4))
    move = np.eye(4)
    move[0, 2] = move[1, 3] = 0.1
    x, moved, p, half = np.zeros(4), np.empty(4), np.eye(4), np.empty((4, 4))
    gain, above = np.empty((4, 2)), np.empty((2, 4))
    for t in range(n):
        for i in range(4):
            moved[i] = 0.0
            for k in range(4):
                moved[i] += move[i, k] * x[k]
        for i in range(4):
            for j in range(4):
                total = 0.0
                for k in range(4):
                    total += move[i, k] * p[k, j]
                half[i, j] = total
        for i in range(4):
            for j in range(4):
                total = 0.0
                for k in range(4):
                    total += half[i, k] * move[j, k]
                p[i, j] = total
            p[i, i] += 0.01
        a, b, c, d = p[0, 0] + 0.5, p[0, 1], p[1, 0], p[1, 1] + 0.5
        scale = 1.0 / (a * d - b * c)
        off_x, off_y = seen[t, 0] - moved[0], seen[t, 1] - moved[1]
        for i in range(4):
            above[0, i], above[1, i] = p[0, i], p[1, i]
            gain[i, 0] = (d * p[0, i] - b * p[1, i]) * scale
            gain[i, 1] = (a * p[1, i] - c * p[0, i]) * scale
            x[i] = moved[i] + gain[i, 0] * off_x + gain[i, 1] * off_y
            out[t, i] = x[i]
        for i in range(4):
            for j in range(4):
                p[i, j] -= gain[i, 0] * above[0, j] + gain[i, 1] * above[1, j]
    return out


@njit
def row_biquad(x: Any) -> Any:
    out = np.empty_like(x)
    a = b = np.float32(0.0)
    for i in range(x.size):
        y = np.float32(0.2) * x[i] + a
        a = np.float32(0.4) * x[i] + np.float32(0.3) * y + b
        b = np.float32(0.2) * x[i] - np.float32(0.1) * y
        out[i] = y
    return out


@njit
def row_conjugate_gradients(a: Any, b: Any) -> Any:
    n = b.size
    x, r, p, image = np.zeros(n), b.copy(), b.copy(), np.empty(n)
    square, k = np.dot(b, b), 0
    while square > 1e-12 and k < 200:
        np.dot(a, p, image)
        length = square / np.dot(p, image)
        for i in range(n):
            x[i] += length * p[i]
            r[i] -= length * image[i]
        new = np.dot(r, r)
        ratio = new / square
        for i in range(n):
            p[i] = r[i] + ratio * p[i]
        square = new
        k += 1
    return x


@njit
def row_virtual_machine(code: Any, start: Any, steps: Any) -> Any:
    a, b, c, d = start[0], start[1], start[2], start[3]
    at = 0
    for _ in range(steps):
        instruction = code[at]
        if instruction == 0:
            a += 1.0
        elif instruction == 1:
            b = a * 0.5
        elif instruction == 2:
            c = math.sin(b)
        elif instruction == 3:
            d = c + 0.9 * d
        else:
            a %= 7.0
        at += 1
        if at == code.size:
            at = 0
    return np.array([a, b, c, d])


@njit(parallel=True)
def row_decision_tree(features: Any, columns: Any, limits: Any, depth: Any) -> Any:
    out = np.empty(len(features), np.int64)
    for i in prange(len(features)):
        node = np.uint64(0)  # an index that is not tested for being negative
        for _ in range(depth):
            is_right = features[i, columns[node]] > limits[node]
            node = np.uint64(2) * node + np.uint64(1) + np.uint64(is_right)
        out[i] = node
    return out


@njit
def row_automaton(text: Any, table: Any) -> Any:
    out = np.empty(text.size, np.int32)
    state = np.uint32(0)  # an index that is not tested for being negative
    for i in range(text.size):
        state = np.uint32(table[state, text[i]])
        out[i] = state
    return out


@njit
def _sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@njit
def row_greedy_decode(weights: Any, words: Any, steps: Any) -> Any:
    count, hidden = words.shape
    columns = words.T.copy()
    h, z = np.zeros(hidden, np.float32), np.empty(3 * hidden, np.float32)
    scores = np.empty(count, np.float32)
    out = np.empty(steps, np.int64)
    word = np.argmax(columns[0])
    for t in range(steps):
        z[:] = 0.0
        for k in range(hidden):
            total = words[word, k] + h[k]
            for j in range(3 * hidden):
                z[j] += total * weights[k, j]
        for j in range(hidden):
            gate, reset = _sigmoid(z[j]), _sigmoid(z[hidden + j])
            other = np.tanh(z[2 * hidden + j] * reset)
            h[j] = gate * h[j] + (np.float32(1.0) - gate) * other
        scores[:] = 0.0
        for k in range(hidden):
            for i in range(count):
                scores[i] += columns[k, i] * h[k]
        word = np.argmax(scores)
        out[t] = word
    return out


@njit
def row_cholesky_loop(a: Any) -> Any:
    """By rows of the transposed factor, in the order of memory."""
    n = len(a)
    high = np.zeros_like(a)
    for j in range(n):
        rest = a[j, j:].copy()
        for k in range(j):
            row = high[k, j:]
            first = row[0]
            for i in range(n - j):
                rest[i] -= first * row[i]
        corner = math.sqrt(rest[0])
        for i in range(n - j):
            high[j, j + i] = rest[i] / corner
    return high.T.copy()


@njit
def row_tridiagonal(lower: Any, upper: Any, right: Any) -> Any:
    n = right.size
    out, c = np.empty_like(right), np.empty_like(right)
    before = d = x = 0.0
    for i in range(n):
        scale = 1.0 / (1.0 - lower[i] * before)
        d = (right[i] - lower[i] * d) * scale
        before = upper[i] * scale
        out[i], c[i] = d, before
    for i in range(n - 1, -1, -1):
        x = out[i] - c[i] * x
        out[i] = x
    return out


@njit
def row_givens(a: Any) -> Any:
    n = len(a)
    r = a.copy()
    for i in range(1, n):
        for j in range(i):
            x, y = r[j, j], r[i, j]
            length = math.sqrt(x * x + y * y) + 1e-30
            c, s = x / length, y / length
            for k in range(n):
                upper, lower = r[j, k], r[i, k]
                r[j, k] = c * upper + s * lower
                r[i, k] = c * lower - s * upper
    return r


@njit(parallel=True)
def row_sobel(image: Any) -> Any:
    n, m = image.shape
    two = np.float32(2.0)
    out = np.empty((n - 2, m - 2), np.float32)
    for i in prange(n - 2):
        a, b, c = image[i], image[i + 1], image[i + 2]
        for j in range(m - 2):
            right = a[j + 2] + two * b[j + 2] + c[j + 2]
            gx = right - (a[j] + two * b[j] + c[j])
            below = c[j] + two * c[j + 1] + c[j + 2]
            gy = below - (a[j] + two * a[j + 1] + a[j + 2])
            out[i, j] = np.sqrt(gx * gx + gy * gy)
    return out


@njit(parallel=True)
def row_box_blur(image: Any) -> Any:
    """By sums of all that is above and left, after a row and a column of zeros."""
    n, m = image.shape
    sums = np.zeros((n + 1, m + 1), np.float32)
    for i in range(n):
        for j in range(m):
            sums[i + 1, j + 1] = sums[i, j + 1] + image[i, j]
    for i in prange(1, n + 1):
        total = np.float32(0.0)
        for j in range(1, m + 1):
            total += sums[i, j]
            sums[i, j] = total
    out = np.empty((n - 4, m - 4), np.float32)
    for i in prange(n - 4):
        a, b = sums[i], sums[i + 5]
        for j in range(m - 4):
            out[i, j] = (b[j + 5] - a[j + 5] - b[j] + a[j]) / np.float32(25.0)
    return out


@njit(parallel=True)
def row_rotate_image(image: Any) -> Any:
    n, m = image.shape
    cos, sin = np.float32(math.cos(math.pi / 6)), np.float32(math.sin(math.pi / 6))
    half_n, half_m = np.float32(n / 2), np.float32(m / 2)
    most_n, most_m = np.float32(n - 1.001), np.float32(m - 1.001)
    zero, one = np.float32(0.0), np.float32(1.0)
    out = np.empty_like(image)
    for row in prange(n):
        i = np.float32(row) - half_n
        for column in range(m):
            j = np.float32(column) - half_m
            u = min(max(cos * i - sin * j + half_n, zero), most_n)
            v = min(max(sin * i + cos * j + half_m, zero), most_m)
            top, left = np.int32(u), np.int32(v)
            a, b = u - np.float32(top), v - np.float32(left)
            above = image[top, left] * (one - b) + image[top, left + 1] * b
            below = image[top + 1, left] * (one - b) + image[top + 1, left + 1] * b
            out[row, column] = above * (one - a) + below * a
    return out
