// Decodes the packets of all ranks into a sum, or an update of the parameters, in one launch.
//
// A block owns a range of positions. It searches the bounds of the range in every packet, all at
// once, and reads the entries between them, all at once. A hash table in shared memory gives the
// entries of one index one slot. There they are added in list order, so in rank order:
//
//   packet 0   3 17      40           entries  3  17  40  17  44
//   packet 1   17        44           turn     0   0   0   1   0    packets before with this index
//
// In turn 0 each slot receives its first value, in turn 1 the second is added, and so on. The time
// depends on the entries and not on the length of the range, except for the zeros of a sum. A chunk
// of zeros is followed at once by its sums, so that both are in the L2 cache: a sector of which a
// part is written later is read and written again.
//
// Slots follow the positions if these spread evenly, so that accesses to neighbours come together:
// memory is read and written in rows.
//
// The host chooses ranges whose entries fill a part of the table on average. A block with too many
// entries divides its range, down to kWidth positions, which have their sums in shared memory.
//
// No two threads write the same element, because a packet has an index once. Indices out of range
// are skipped.
#pragma once

#include "cuda/block.cuh"
#include "cuda/numbers.cuh"
#include "cuda/search.cuh"

namespace pycomm::cuda {

// Small blocks: while one waits, others of the multiprocessor have accesses in flight.
inline constexpr unsigned kDecodeThreads = 256;
// Blocks that a multiprocessor holds, which limits the registers. 7.5 holds 1,024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr unsigned kDecodeResident = 4;
#else
inline constexpr unsigned kDecodeResident = 5;
#endif
inline constexpr unsigned kWidth = 512;       // positions of a dense part
inline constexpr unsigned kZeroChunk = 4096;  // positions with zeros before their sums are written
inline constexpr unsigned kNear = 8;          // slots near its place that an index may have
inline constexpr unsigned kMostPackets = 512;
inline constexpr unsigned kMostArrays = 512;

template <class Real>
inline constexpr unsigned kEntriesEach = sizeof(Real) == 8 ? 2 : 4;  // of a thread
template <class Real>
inline constexpr unsigned kCapacity = kEntriesEach<Real> * kDecodeThreads;
template <class Real>
inline constexpr unsigned kSlots = 2 * kCapacity<Real>;

struct Entry {
  void* data;
  unsigned first, count;  // its positions; between the end of one and the next are gaps
};
// Launch arguments, so that they need no device memory.
struct Decoding {
  unsigned packet_count, array_count;
  unsigned begin, end;  // positions of these arrays
  unsigned range;       // positions of a block
  float each;           // 1 / positions of all arrays
  Entries packets[kMostPackets];
  Entry arrays[kMostArrays];
};
static_assert(sizeof(Decoding) <= 32000);

inline constexpr unsigned kNone = ~0u;  // no index

// The shared memory of a block.
template <class Real>
struct alignas(16) DecodeSpace {
  unsigned keys[kSlots<Real>];  // the index of a slot; in a dense part bits: there is a sum
  union {
    unsigned masks[kSlots<Real>];  // the packets of a slot
    Real sums[kSlots<Real>];
  };
  unsigned begins[kMostPackets];  // the first entry in the current part of the range
  unsigned ends[kMostPackets];
  unsigned before[kMostPackets + 1];  // entries of the part in all packets before
};
static_assert(sizeof(DecodeSpace<float>) <= 40000 && sizeof(DecodeSpace<double>) <= 40000);

// The part of a range that a block decodes at once, and its numbers of the result.
template <class Real>
struct Part {
  unsigned low, high, total;  // positions, entries
  unsigned filled;            // positions of a sum before this one have zeros or sums
  Real scale, lr;
};

// How a part follows the one before in the range of the block.
enum class Order : uint8_t { first, next, shorter };

// The array of a position.
__device__ __forceinline__ unsigned array_of(const Decoding& d, unsigned position) {
  unsigned low = 0, high = d.array_count;
#pragma unroll 1
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    if (d.arrays[middle].first <= position)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Null in a gap.
template <class T>
__device__ __forceinline__ T* element(const Decoding& d, unsigned position) {
  const Entry& array = d.arrays[array_of(d, position)];
  const unsigned i = position - array.first;
  return i < array.count ? static_cast<T*>(array.data) + i : nullptr;
}

// Writes zeros to [low, high), 16 bytes at a time. Called by a block.
template <class T>
__device__ __forceinline__ void fill_zeros(const Decoding& d, unsigned low, unsigned high) {
#pragma unroll 1
  for (unsigned a = array_of(d, low); a < d.array_count && d.arrays[a].first < high; ++a) {
    const unsigned first = max(low, d.arrays[a].first);
    const unsigned last = min(high, d.arrays[a].first + d.arrays[a].count);
    if (first >= last) continue;
    T* const to = static_cast<T*>(d.arrays[a].data) + (first - d.arrays[a].first);
    const unsigned count = last - first;
    const auto past = static_cast<unsigned>(reinterpret_cast<uintptr_t>(to) % 16);
    const unsigned head = min(count, static_cast<unsigned>((16 - past) % 16 / sizeof(T)));
    constexpr unsigned kEach = 16 / sizeof(T);
    const unsigned whole = (count - head) / kEach;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < whole; i += kDecodeThreads)
      gpu::store(reinterpret_cast<uint4*>(to + head) + i, uint4{});
    if (threadIdx.x < head) gpu::store(to + threadIdx.x, T{0});
    const unsigned at = head + whole * kEach + threadIdx.x;
    if (at < count) gpu::store(to + at, T{0});
  }
}

template <bool kUpdate, class T, class Real>
__device__ __forceinline__ void write(T* to, T old, Real sum, const Part<Real>& part) {
  if (to == nullptr) return;
  const Real mean = multiply(part.scale, sum);
  if constexpr (kUpdate)
    gpu::store(to, narrow<T>(fused(-part.lr, mean, widen(old))));
  else
    gpu::store(to, narrow<T>(mean));
}

// Sets one word for each slot. Called by a block.
template <unsigned kWords>
__device__ __forceinline__ void fill_words(unsigned (&words)[kWords], unsigned value) {
  static_assert(kWords % (4 * kDecodeThreads) == 0);
#pragma unroll
  for (unsigned i = 0; i < kWords / 4; i += kDecodeThreads)
    reinterpret_cast<uint4*>(words)[i + threadIdx.x] = uint4{value, value, value, value};
}

// Searches the bounds of the part in all packets. The first part has two bounds in each, any other
// begins at a known entry.
template <class Real>
__device__ __forceinline__ void find_bounds(const Decoding& d, DecodeSpace<Real>& space,
                                            const Part<Real>& part, Order order) {
  const unsigned bounds = (order == Order::first ? 2 : 1) * d.packet_count;
  unsigned bits = 5;
#pragma unroll 1
  while (bits > 0 && bounds << bits > kDecodeThreads) --bits;
#pragma unroll 1
  for (unsigned base = 0; base < bounds; base += kDecodeThreads >> bits) {
    const unsigned bound = base + (threadIdx.x >> bits);
    const bool mine = bound < bounds, start = order == Order::first && bound < d.packet_count;
    const unsigned skipped = order == Order::first && !start ? d.packet_count : 0;
    const unsigned p = mine ? bound - skipped : 0;
    const unsigned position = start ? part.low : part.high;
    const Entries& packet = d.packets[p];
    Search search{};
    unsigned begin = 0;
    if (order == Order::first) {
      if (mine) search = expected(packet, static_cast<float>(position) * d.each, bits);
    } else if (mine) {
      begin = order == Order::next ? space.ends[p] : space.begins[p];
      search = {begin, begin + min(packet.count - begin, part.high - part.low), 0, 0};
      spread(search, bits);
    }
    const unsigned found = find_entry(packet.indices, search, bits, static_cast<int32_t>(position));
    __syncwarp();  // all lanes have read `ends`
    if (!mine || (threadIdx.x & ((1u << bits) - 1)) != 0) continue;
    if (order != Order::first) space.begins[p] = begin;
    (start ? space.begins : space.ends)[p] = found;
  }
}

// Counts the entries of the current part and fills `before`. Called by a block.
template <class Real>
__device__ __forceinline__ unsigned count_entries(DecodeSpace<Real>& space, unsigned packets) {
  constexpr unsigned kEach = kMostPackets / kDecodeThreads;
  static_assert(kMostPackets % kDecodeThreads == 0);
  unsigned counts[kEach], mine = 0;
#pragma unroll
  for (unsigned i = 0; i < kEach; ++i) {
    const unsigned p = threadIdx.x * kEach + i;
    counts[i] = 0;
    if (p < packets) {
      const unsigned begin = space.begins[p], end = space.ends[p];
      counts[i] = end > begin ? min(end - begin, 1u << 20) : 0;  // the sum of all has 32 bits
    }
    mine += counts[i];
  }
  unsigned before = scan_block<kDecodeThreads>(mine) - mine;
#pragma unroll
  for (unsigned i = 0; i < kEach; ++i) {
    const unsigned p = threadIdx.x * kEach + i;
    if (p < packets) space.before[p] = before;
    before += counts[i];
  }
  if (threadIdx.x == kDecodeThreads - 1) space.before[packets] = before;
  __syncthreads();
  return space.before[packets];
}

// The place of an entry in the table.
struct Place {
  unsigned slot : 12;
  unsigned packet : 9;
  unsigned turn : 9;   // number of earlier packets with its index
  unsigned there : 1;  // whether the index is in the part
};
static_assert(kSlots<float> <= 1u << 12 && kMostPackets <= 1u << 9);

// Finds the turn of each entry of the thread, from the packets of each slot, 32 at a time. `masks`
// are cleared.
template <class Real>
__device__ __forceinline__ void find_turns(DecodeSpace<Real>& space, unsigned packets,
                                           Place (&place)[kEntriesEach<Real>]) {
#pragma unroll 1
  for (unsigned group = 0;; group += 32) {
#pragma unroll
    for (Place& p : place)
      if (p.there && p.packet / 32 == group / 32)
        atomicOr(&space.masks[p.slot], 1u << (p.packet % 32));
    __syncthreads();
#pragma unroll
    for (Place& p : place) {
      if (!p.there || p.packet < group) continue;
      const unsigned below = p.packet < group + 32 ? (1u << (p.packet % 32)) - 1u : ~0u;
      p.turn += static_cast<unsigned>(__popc(space.masks[p.slot] & below));
    }
    __syncthreads();
    if (group + 32 >= packets) return;
    fill_words(space.masks, 0);
    __syncthreads();
  }
}

// Takes the slot of an index, or finds it. Indices that do not spread evenly have no slot near
// their place in the part, so that they are hashed.
template <class Real>
__device__ __forceinline__ unsigned take_slot(unsigned (&keys)[kSlots<Real>], unsigned index,
                                              unsigned place) {
  unsigned slot = min(place, kSlots<Real> - 1);
#pragma unroll 1
  for (unsigned tries = 1;; ++tries) {
    const unsigned found = atomicCAS(&keys[slot], kNone, index);
    if (found == kNone || found == index) return slot;
    slot = (slot + 1) % kSlots<Real>;
    if (tries == kNear) slot = index * 2654435769u / (~0u / kSlots<Real> + 1);  // Fibonacci hashing
  }
}

// A slot of which the thread writes the element. A warp has consecutive ones.
template <class Real>
__device__ __forceinline__ unsigned own_slot(unsigned i) {
  constexpr unsigned kOwn = kSlots<Real> / kDecodeThreads;
  return (threadIdx.x / 32 * kOwn + i) * 32 + threadIdx.x % 32;
}

// Decodes a part of at most kCapacity entries.
template <bool kUpdate, class T, class V, class Real>
__device__ __forceinline__ void decode_sparse(const Decoding& d, DecodeSpace<Real>& space,
                                              Part<Real>& part) {
  constexpr unsigned kEach = kEntriesEach<Real>, kOwn = kSlots<Real> / kDecodeThreads;
  Place place[kEach];
  unsigned packet[kEach] = {}, index[kEach];
  V sent[kEach];
  Real value[kEach];
  T old[kOwn];
#pragma unroll 1
  for (unsigned step = 1u << (31 - __clz(static_cast<int>(d.packet_count | 1))); step > 0;
       step /= 2) {
#pragma unroll
    for (unsigned e = 0; e < kEach; ++e) {
      const unsigned number = threadIdx.x + e * kDecodeThreads, next = packet[e] + step;
      if (next < d.packet_count && space.before[next] <= number) packet[e] = next;
    }
  }
#pragma unroll
  for (unsigned e = 0; e < kEach; ++e) {
    const unsigned number = threadIdx.x + e * kDecodeThreads;
    const Entries& from = d.packets[packet[e]];
    const unsigned at = space.begins[packet[e]] + (number - space.before[packet[e]]);
    const bool mine = number < part.total;
    index[e] = mine ? static_cast<unsigned>(gpu::load(&from.indices[at])) : kNone;
    sent[e] = mine ? gpu::load(&static_cast<const V*>(from.values)[at]) : V{};
  }
  fill_words(space.keys, kNone);
  fill_words(space.masks, 0);
  __syncthreads();
  const float slots_each =
      static_cast<float>(kSlots<Real>) / static_cast<float>(part.high - part.low);
#pragma unroll
  for (unsigned e = 0; e < kEach; ++e) {
    place[e] = {};
    place[e].packet = packet[e];
    value[e] = static_cast<Real>(widen(sent[e]));
    const unsigned at = index[e] - part.low;
    if (at >= part.high - part.low) continue;
    place[e].there = 1;
    place[e].slot = take_slot<Real>(space.keys, index[e],
                                    static_cast<unsigned>(static_cast<float>(at) * slots_each));
  }
  __syncthreads();
#pragma unroll
  for (unsigned i = 0; i < kOwn && kUpdate; ++i) {
    const unsigned at = space.keys[own_slot<Real>(i)];
    T* const from = at != kNone ? element<T>(d, at) : nullptr;
    if (from != nullptr) old[i] = gpu::load(from);
  }
  find_turns(space, d.packet_count, place);
#pragma unroll 1
  for (unsigned turn = 0;; ++turn) {
    bool more = false;
#pragma unroll
    for (unsigned e = 0; e < kEach; ++e) {
      if (!place[e].there) continue;
      Real& sum = space.sums[place[e].slot];
      if (place[e].turn == turn) sum = turn == 0 ? value[e] : add(sum, value[e]);
      more = more || place[e].turn > turn;
    }
    if (__syncthreads_or(more) == 0) break;
  }
  unsigned low = part.low;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const unsigned slot = own_slot<Real>(i), at = space.keys[slot];
      if (at == kNone || (!kUpdate && at - low >= part.filled - low)) continue;
      write<kUpdate>(element<T>(d, at), old[i], space.sums[slot], part);
    }
    if (kUpdate || part.filled >= part.high) return;
    low = part.filled;
    part.filled = low + min(part.high - low, kZeroChunk);
    fill_zeros<T>(d, low, part.filled);
    __syncthreads();
  }
}

// What a thread has loaded of a packet.
template <class V>
struct Loaded {
  unsigned index[kWidth / kDecodeThreads];
  V value[kWidth / kDecodeThreads];
};
template <class V, class Real>
__device__ __forceinline__ Loaded<V> load_packet(const Decoding& d, DecodeSpace<Real>& space,
                                                 unsigned packet) {
  Loaded<V> loaded;
  const Entries& from = d.packets[packet];
  const unsigned begin = space.begins[packet], end = space.ends[packet];
#pragma unroll
  for (unsigned e = 0; e < kWidth / kDecodeThreads; ++e) {
    const unsigned at = begin + threadIdx.x + e * kDecodeThreads;
    loaded.index[e] = kNone;
    loaded.value[e] = V{};
    if (at >= end) continue;
    loaded.index[e] = static_cast<unsigned>(gpu::load(&from.indices[at]));
    loaded.value[e] = gpu::load(&static_cast<const V*>(from.values)[at]);
  }
  return loaded;
}

// Decodes a part of at most kWidth positions, packet by packet. The next packet is loaded before
// one is added.
template <bool kUpdate, class T, class V, class Real>
__device__ __forceinline__ void decode_dense(const Decoding& d, DecodeSpace<Real>& space,
                                             Part<Real>& part) {
  constexpr unsigned kEach = kWidth / kDecodeThreads;
  unsigned* const there = space.keys;
  if (threadIdx.x < kWidth / 32) there[threadIdx.x] = 0;
  Loaded<V> next = load_packet<V>(d, space, 0);
#pragma unroll 1
  for (unsigned p = 0; p < d.packet_count; ++p) {
    const Loaded<V> now = next;
    if (p + 1 < d.packet_count) next = load_packet<V>(d, space, p + 1);
    __syncthreads();
#pragma unroll
    for (unsigned e = 0; e < kEach; ++e) {
      const unsigned i = now.index[e] - part.low;
      if (i >= part.high - part.low) continue;
      const auto value = static_cast<Real>(widen(now.value[e]));
      const unsigned bit = 1u << (i % 32);
      const bool more = (atomicOr(&there[i / 32], bit) & bit) != 0;
      space.sums[i] = more ? add(space.sums[i], value) : value;
    }
  }
  __syncthreads();
  T old[kEach];
  T* to[kEach];
#pragma unroll
  for (unsigned e = 0; e < kEach; ++e) {
    const unsigned i = threadIdx.x + e * kDecodeThreads;
    to[e] = i < part.high - part.low ? element<T>(d, part.low + i) : nullptr;
    if (kUpdate && (there[i / 32] >> (i % 32) & 1) != 0 && to[e] != nullptr)
      old[e] = gpu::load(to[e]);
  }
#pragma unroll
  for (unsigned e = 0; e < kEach; ++e) {
    const unsigned i = threadIdx.x + e * kDecodeThreads;
    if ((there[i / 32] >> (i % 32) & 1) != 0)
      write<kUpdate>(to[e], old[e], space.sums[i], part);
    else if (!kUpdate && to[e] != nullptr)
      gpu::store(to[e], T{0});
  }
  part.filled = max(part.filled, part.high);
}

// kUpdate: param = fma(-lr, scale * sum, param) if a packet has the element; else out = scale *
// sum, 0 without a packet.
template <bool kUpdate, class T, class V>
__global__ void __launch_bounds__(kDecodeThreads, sizeof(V) == 8 ? 1 : kDecodeResident)
    decode(const __grid_constant__ Decoding d, Wide<T> scale, Wide<T> lr) {
  using Real = Wide<T>;
  constexpr unsigned kTarget = kCapacity<Real> / 2;
  auto& space = gpu::shared<DecodeSpace<Real>>();
  const unsigned start = d.begin + blockIdx.x * d.range;
  const unsigned stop = start + min(d.end - start, d.range);
  Part<Real> part{start, stop, 0, start, scale, lr};
  if (!kUpdate) {  // the device writes during the searches
    part.filled = start + min(stop - start, 2 * kZeroChunk);
    fill_zeros<T>(d, start, part.filled);
  }
  unsigned length = d.range;
  Order order = Order::first;
#pragma unroll 1
  while (true) {
    find_bounds(d, space, part, order);
    __syncthreads();
    const unsigned positions = part.high - part.low;
    part.total = count_entries(space, d.packet_count);
    const bool sparse = part.total <= kCapacity<Real>;
    if (!sparse && positions > kWidth) {
      order = Order::shorter;
      length = max(kWidth, positions / (part.total / kTarget + 1));
    } else {
      if (!sparse)
        decode_dense<kUpdate, T, V>(d, space, part);
      else if (!kUpdate || part.total != 0)
        decode_sparse<kUpdate, T, V>(d, space, part);
      if (part.high == stop) return;
      order = Order::next;
      if (part.total < kTarget / 2) length = 2 * min(length, d.range / 2);
      part.low = part.high;
    }
    part.high = part.low + min(stop - part.low, length);
    __syncthreads();
  }
}

}  // namespace pycomm::cuda
