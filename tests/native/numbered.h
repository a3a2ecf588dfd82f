// Messages with numbers, as the suites of messages and of threads send and receive them.
#pragma once

#include <string>

#include "calls.h"
#include "harness.h"
#include "ranks.h"

namespace ranks {

inline Array numbers(size_t count, int seed) {
  Array array(Dtype::int64, count);
  array.fill([&](size_t i) { return element(seed, i); });
  return array;
}

inline void send(group::Group& group, size_t count, int seed, int peer, uint32_t tag) {
  Array array = numbers(count, seed);
  group.run(message(Operation::send, array, peer, tag));
}

inline void receive(group::Group& group, size_t count, int seed, int peer, uint32_t tag) {
  Array array(Dtype::int64, count);
  group.run(message(Operation::recv, array, peer, tag));
  expect(array == numbers(count, seed), "message " + std::to_string(seed) + " is wrong");
}

}  // namespace ranks
