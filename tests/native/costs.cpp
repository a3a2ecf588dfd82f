#include "costs.h"

#include <bit>

#include "collectives/collectives.h"

namespace pycomm {
namespace {

int log_of(int size) { return static_cast<int>(std::bit_width(static_cast<unsigned>(size - 1))); }

// The children of a node of the binomial tree, and the nodes under it with itself, the slow way.
size_t children_of(int node, int size) {
  size_t children = 0;
  for (int other = 1; other < size; ++other) children += (other & (other - 1)) == node;
  return children;
}

size_t under(int node, int size) {
  size_t nodes = 0;
  for (int other = 0; other < size; ++other) {
    int at = other;
    while (at > node) at &= at - 1;
    nodes += at == node;
  }
  return nodes;
}

// The cost of an announcement for each rank.
Cost announcement_cost(int size) {
  const auto n = static_cast<size_t>(size), log = static_cast<size_t>(log_of(size));
  if (size == 2) return {};
  if (size <= 8) return {n - 1, 0, size - 1};
  return {log, log, log_of(size)};
}

Cost operator+(const Cost& a, const Cost& b) {
  return {a.messages + b.messages, a.elements + b.elements, a.steps + b.steps};
}

Cost ring_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const auto part = [&](int i) {
    return collectives::piece(collectives::Space::input, c, size, i).count;
  };
  const size_t pieces = collectives::ring_broadcast_pieces(size, c);
  switch (what.operation) {
    case Operation::all_reduce:
      return {2 * (n - 1), 2 * c - part(rank) - part(rank + 1), 2 * (size - 1)};
    case Operation::broadcast: {
      const bool last = (rank + 1) % size == what.root;
      return {last ? 0 : pieces, last ? 0 : c, static_cast<int>(pieces) + size - 2};
    }
    case Operation::reduce: {
      const size_t gives = rank != what.root;
      return {gives * pieces, gives * c, static_cast<int>(pieces) + size - 2};
    }
    case Operation::all_gather:
      return announcement_cost(size) + Cost{n - 1, (n - 1) * c, size - 1};
    case Operation::reduce_scatter:
      return {n - 1, (n - 1) * c, size - 1};
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
  }
  return {};
}

Cost direct_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const size_t rounds = size > 2 ? 2 : 1, gives = rank != what.root;
  switch (what.operation) {
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      return {n - 1, (n - 1) * c, size - 1};
    case Operation::broadcast:
      return {rank == what.root ? n - 1 : 0, rank == what.root ? (n - 1) * c : 0, size - 1};
    case Operation::all_gather:
    case Operation::all_to_all:
      return announcement_cost(size) + Cost{n - 1, (n - 1) * c, size - 1};
    case Operation::barrier:
      return {n - 1, 0, size - 1};
    case Operation::reduce:
      return {gives, gives * c, size - 1};
    case Operation::gather:
      return {rounds * gives, gives * c, static_cast<int>(rounds) * (size - 1)};
    case Operation::scatter:
      return {rank == what.root ? n - 1 : 0, rank == what.root ? (n - 1) * c : 0, size - 1};
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

// The tree plans of large arrays, through a binary tree. The steps are a bound.
Cost pipelined_cost(int rank, int size, const Case& what) {
  const int node = (rank - what.root + size) % size;
  const size_t c = what.count, up = node != 0;
  const auto pieces = static_cast<size_t>(collectives::tree_pieces(size, c));
  const size_t down = (2 * node + 1 < size ? 1 : 0) + (2 * node + 2 < size ? 1 : 0);
  const int steps = static_cast<int>(pieces);
  if (what.operation == Operation::reduce)
    return {up * pieces, up * c, 2 * steps + 3 * log_of(size), true};
  if (what.operation == Operation::broadcast)
    return {down * pieces, down * c, 2 * steps + 2 * log_of(size), true};
  return {(up + down) * pieces, (up + down) * c, 4 * steps + 5 * log_of(size), true};
}

Cost tree_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count;
  const int node = (rank - what.root + size) % size;
  const size_t children = children_of(node, size), below = under(node, size), up = rank != 0;
  const bool cut = what.operation == Operation::all_reduce ||
                   what.operation == Operation::broadcast || what.operation == Operation::reduce;
  if (cut && collectives::tree_pieces(size, c) > 1) return pipelined_cost(rank, size, what);
  switch (what.operation) {
    case Operation::all_reduce:
      return {children + up, (children + up) * c, 2 * log_of(size)};
    case Operation::broadcast:
      return {children, children * c, log_of(size)};
    case Operation::reduce:
      return {node != 0, (node != 0) * c, log_of(size)};
    case Operation::all_gather:
      return {children + up, up * below * c + children * n * c, 2 * log_of(size)};
    case Operation::reduce_scatter:
      return {children + up, up * n * c + (below - 1) * c, 2 * log_of(size)};
    case Operation::send:
    case Operation::recv:
    case Operation::gather:
      return {node != 0, (node != 0) * below * c, log_of(size)};
    case Operation::scatter:
      return {children, (below - 1) * c, log_of(size)};
    case Operation::barrier:
    case Operation::all_to_all:
      break;
  }
  return {};
}

Cost direct_two_phase_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size);
  const size_t own = collectives::piece(collectives::Space::input, what.count, size, rank).count;
  return {2 * (n - 1), what.count - own + (n - 1) * own, 2 * (size - 1)};
}

// Elements of parts `first` to `end` (modulo size).
template <typename CountOf>
size_t sum_of(int first, int end, int size, CountOf count_of) {
  size_t sum = 0;
  for (int i = first; i < end; ++i) sum += count_of(i % size);
  return sum;
}

Cost halving_cost(int rank, int size, const Case& what) {
  const auto n = static_cast<size_t>(size), c = what.count, log = static_cast<size_t>(log_of(size));
  const auto one_piece = [&](int i) {
    return collectives::piece(collectives::Space::input, c, size, i).count;
  };
  switch (what.operation) {
    case Operation::all_reduce: {
      size_t elements = c - one_piece(rank);
      for (int skip = size; skip > 1;) {
        const int next = (skip + 1) / 2;
        elements += sum_of(rank, rank + skip - next, size, one_piece);
        skip = next;
      }
      return {2 * log, elements, 2 * log_of(size)};
    }
    case Operation::all_gather:
    case Operation::reduce_scatter:
      return {log, (n - 1) * c, log_of(size)};
    case Operation::barrier:
      return {log, log, log_of(size)};
    case Operation::broadcast:
    case Operation::send:
    case Operation::recv:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
  }
  return {};
}

// hierarchical on one host: the cost of the one-level plan that it uses instead.
Cost one_level_cost(int rank, int size, const Case& what) {
  const bool parts =
      what.operation == Operation::all_gather || what.operation == Operation::reduce_scatter;
  const bool is_long = what.count * (parts ? static_cast<size_t>(size) : 1) >= 65536;
  const bool rooted = what.operation == Operation::broadcast || what.operation == Operation::reduce;
  if (is_long) return ring_cost(rank, size, what);
  return rooted ? tree_cost(rank, size, what) : halving_cost(rank, size, what);
}

}  // namespace

Cost cost_of(Algorithm algorithm, int rank, int size, const Case& what) {
  if (size == 1) return {};
  switch (algorithm) {
    case Algorithm::hierarchical:
      return one_level_cost(rank, size, what);
    case Algorithm::ring:
      return ring_cost(rank, size, what);
    case Algorithm::direct:
      return direct_cost(rank, size, what);
    case Algorithm::tree:
      return tree_cost(rank, size, what);
    case Algorithm::direct_two_phase:
      return direct_two_phase_cost(rank, size, what);
    case Algorithm::halving:
      return halving_cost(rank, size, what);
    case Algorithm::automatic:
    case Algorithm::shared_memory:  // no plan
    case Algorithm::nccl:
    case Algorithm::host_staged:
      break;
  }
  return {};
}

}  // namespace pycomm
