// The state of blocks and lanes, shared by grid.cpp (scheduling) and lanes.cpp (warp operations).
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "grid.hpp"

namespace emulator {

enum class State : uint8_t { ready, at_barrier, at_warp, done };

struct Block;

struct Lane : Thread {
  State state = State::done;
  unsigned rank = 0;  // in the block
  WarpCall call;
  uint64_t result = 0;
  Where where;  // of the barrier it waits at
  Block* block = nullptr;
  bool learned = false;  // through a flag, from other blocks
  std::unique_ptr<Fiber> fiber;
};

// The order of the threads of one block. New for every block: a later block would otherwise see
// the earlier releases.
struct Tokens {
  Token started;
  std::array<Token, 2> barrier;               // by parity of the round
  std::array<std::array<Token, 2>, 32> warp;  // of each warp, by parity of its round
};

struct Block {
  std::deque<Lane> lanes;  // may be more than this grid uses
  bool running = false;
  unsigned alive = 0, arrived = 0, round = 0;
  std::array<unsigned, 2> predicates{};  // by parity of the round, so that the last one stays
  Where barrier;
  std::vector<unsigned> waiting, returned, rounds;  // by warp
  char* arena = nullptr;
  size_t used = 0, static_bytes = 0;
  void* dynamic = nullptr;
  std::vector<std::pair<const void*, void*>> objects;
  std::unique_ptr<Tokens> tokens;

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
};

// xorshift64*: the same sequence everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull | 1) {}
  unsigned below(unsigned n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>((state_ * 0x2545f4914f6cdd1dull >> 32) % n);
  }

 private:
  uint64_t state_;
};

struct Grid {
  ~Grid() { finished.acquire(); }  // the thread has waited for its lanes

  Fiber main;
  Shape shape{};
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned resident = 0;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  Random random{1};
  uint64_t spins = 0;
  std::chrono::steady_clock::time_point started{};
  std::string failure;
  Token finished;
};

// Lets the lanes of `mask` continue when all have arrived. Returns whether they had.
bool complete(Block& block, unsigned warp, unsigned mask);
void open_barrier(Block& block);

std::string place(const Where& where);
std::string describe(const Lane& lane);
std::string deadlock(const Grid& grid);

}  // namespace emulator
