// Blocks and threads: the next fiber to run, barriers, shared memory, and the report of a deadlock.
#include "grid.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "fiber.hpp"
#include "lanes.hpp"

namespace emulator {

thread_local constinit Thread* current = nullptr;

namespace {

constexpr size_t kArena = size_t{256} << 10;
constexpr size_t kMostStatic = size_t{48} << 10, kMostShared = size_t{99} << 10;  // of 8.6 and 8.9
constexpr unsigned kMostRows = 65535;
constexpr size_t kRedZone = 64;
constexpr std::chrono::seconds kMostWait{60};  // of a grid for the host

thread_local std::unique_ptr<Grid> grid;

Lane& self() {
  if (current == nullptr) throw std::logic_error("a device function was called outside a kernel");
  return static_cast<Lane&>(*current);
}

void leave(Lane& lane) { grid->main.run(*lane.fiber); }

// The loop of every fiber: one CUDA thread after the other.
void live() {
  Fiber::arrived(grid->main);
  for (;;) {
    Lane& lane = self();
    Block& block = *lane.block;
    block.tokens->started.acquire();
    grid->entry(grid->argument);
    grid->finished.release();
    lane.state = State::done;
    block.returned[lane.rank / 32] |= 1u << lane.lane;
    --block.alive;
    if (block.alive != 0 && block.arrived == block.alive) open_barrier(block);
    leave(lane);
  }
}

void* carve(Block& block, size_t bytes, size_t alignment) {
  const size_t begin = (block.used + alignment - 1) / alignment * alignment;
  if (begin + bytes + kRedZone > kArena) fail("shared memory does not fit");
  char* p = block.arena + begin;
  block.used = begin + bytes + kRedZone;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
  for (size_t i = 0; i < bytes; ++i)
    const_cast<volatile char*>(p)[i] = static_cast<char>(options().poison);
  return p;
}

// A mapping put over the old one has no history for ThreadSanitizer, and its own pages are zero.
void map_arena(Block& block) {
  if (block.arena != nullptr && !__tsan_acquire) return;
  const int over = block.arena == nullptr ? 0 : MAP_FIXED;
  void* p =
      mmap(block.arena, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | over, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  block.arena = static_cast<char*>(p);
}

void start(Block& block, unsigned index) {
  const unsigned threads = grid->shape.threads, warps = (threads + 31) / 32;
  block.waiting.assign(warps, 0);
  block.returned.assign(warps, 0);
  block.rounds.assign(warps, 0);
  block.alive = threads;
  block.arrived = block.round = 0;
  block.used = block.static_bytes = 0;
  block.objects.clear();
  map_arena(block);
  if (__asan_poison_memory_region) __asan_poison_memory_region(block.arena, kArena);
  block.dynamic = carve(block, grid->shape.dynamic_bytes, 16);
  // One fiber runs threads of several blocks in turn, which looks ordered to ThreadSanitizer (a new
  // one for each costs ten times the time). With fibers rotated between blocks only unlike threads
  // look so, and races between blocks show. What a thread learned from flags must go, though.
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = block.lanes[i];
    if (std::exchange(lane.learned, false) && __tsan_acquire)
      lane.fiber = nullptr, lane.fiber = std::make_unique<Fiber>(live);
  }
  for (unsigned i = 0; i + 1 < threads; ++i)
    std::swap(block.lanes[i].fiber, block.lanes[i + 1].fiber);
  block.tokens = std::make_unique<Tokens>();
  block.tokens->started.release();
  for (unsigned i = 0; i < threads; ++i) {
    Lane& lane = block.lanes[i];
    lane.thread_index = {i, 0, 0};
    lane.block_index = {index % grid->shape.blocks, index / grid->shape.blocks, 0};
    lane.block_size = dim3(threads);
    lane.grid_size = dim3(grid->shape.blocks, grid->shape.rows);
    lane.rank = i;
    lane.lane = i % 32;
    lane.block = &block;
    lane.state = State::ready;
  }
  block.running = true;
}

// Visits 0 .. count-1 once each, in the order of the options.
class Walk {
 public:
  explicit Walk(unsigned count) : count_(count) {
    const Order order = options().order;
    if (order == Order::reverse) at_ = count - 1, step_ = count - 1;
    if (order == Order::random) {
      at_ = grid->random.below(count);
      do step_ = 1 + grid->random.below(count);
      while (std::gcd(step_, count) != 1);
    }
  }
  unsigned next() {
    const unsigned here = at_;
    at_ = static_cast<unsigned>((uint64_t{at_} + step_) % count_);
    return here;
  }

 private:
  unsigned count_, at_ = 0, step_ = 1;
};

// Runs each thread of the block that can run, once. Returns whether any could.
bool pass(Block& block) {
  Walk walk(grid->shape.threads);
  bool ran = false;
  for (unsigned i = 0; i < grid->shape.threads && grid->failure.empty(); ++i) {
    Lane& lane = block.lanes[walk.next()];
    if (lane.state != State::ready) continue;
    current = &lane;
    lane.fiber->run(grid->main);
    current = nullptr;
    ran = true;
  }
  return ran;
}

void prepare(const Shape& shape) {
  if (current != nullptr) throw std::logic_error("a kernel cannot launch a kernel");
  if (shape.threads == 0 || shape.threads > 1024 || shape.blocks == 0 || shape.rows == 0 ||
      shape.rows > kMostRows || shape.dynamic_bytes > kMostShared)
    throw std::runtime_error("a launch that no GPU accepts: " + std::to_string(shape.rows) +
                             " times " + std::to_string(shape.blocks) + " blocks of " +
                             std::to_string(shape.threads) + " threads, " +
                             std::to_string(shape.dynamic_bytes) + " bytes of shared memory");
  if (!grid) grid = std::make_unique<Grid>();
  grid->main.adopt();
  grid->shape = shape;
  grid->random = Random(options().seed);
  grid->spins = 0;
  grid->started = std::chrono::steady_clock::now();
  grid->failure.clear();
  const unsigned slots = std::clamp(options().resident_blocks, 1u, shape.blocks * shape.rows);
  while (grid->blocks.size() < slots) grid->blocks.push_back(std::make_unique<Block>());
  for (unsigned i = 0; i < slots; ++i) {
    auto& lanes = grid->blocks[i]->lanes;
    while (lanes.size() < shape.threads) lanes.emplace_back().fiber = std::make_unique<Fiber>(live);
  }
  grid->resident = slots;
}

void run() {
  const unsigned total = grid->shape.blocks * grid->shape.rows;
  Walk walk(total);
  unsigned started = 0, done = 0;
  while (done < total && grid->failure.empty()) {
    bool ran = false;
    Walk slots(grid->resident);
    for (unsigned i = 0; i < grid->resident && grid->failure.empty(); ++i) {
      Block& block = *grid->blocks[slots.next()];
      if (!block.running) {
        if (started == total) continue;
        start(block, walk.next());
        ++started;
      }
      ran |= pass(block);
      if (block.alive == 0) block.running = false, ++done;
    }
    if (!ran && done < total && grid->failure.empty()) grid->failure = deadlock(*grid);
  }
}

}  // namespace

// Unmapped memory may become another thread's stack, which must not be poisoned.
Block::~Block() {
  if (arena == nullptr) return;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(arena, kArena);
  munmap(arena, kArena);
}

Options& options() {
  static Options all = [] {
    Options made;
    const char* const channels = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (channels != nullptr)
      made.channels = static_cast<unsigned>(std::clamp(std::atoi(channels), 1, 32));
    return made;
  }();
  return all;
}

Traffic& traffic() {
  static Traffic sum;
  return sum;
}

// Grids of several devices count at once.
void count_load(size_t bytes) { __atomic_fetch_add(&traffic().loaded, bytes, __ATOMIC_RELAXED); }
void count_store(size_t bytes) { __atomic_fetch_add(&traffic().stored, bytes, __ATOMIC_RELAXED); }

void run_grid(const Shape& shape, void (*entry)(void*), void* argument) {
  prepare(shape);
  grid->entry = entry;
  grid->argument = argument;
  __atomic_fetch_add(&traffic().launches, 1, __ATOMIC_RELAXED);
  try {
    run();
  } catch (const std::runtime_error& error) {
    grid->failure = error.what();
  }
  grid->finished.acquire();
  if (grid->failure.empty()) return;
  const std::string failure = grid->failure;
  grid.reset();  // the stacks hold threads that will never end
  throw std::runtime_error(failure);
}

void fail(const std::string& what, Where where) {
  const std::string text = what + " at " + place(where);
  if (current == nullptr) throw std::runtime_error(text);
  grid->failure = text + "\n" + describe(self());
  for (;;) leave(self());
}

void open_barrier(Block& block) {
  block.arrived = 0;
  ++block.round;
  block.predicates[block.round & 1] = 0;
  for (Lane& lane : block.lanes)
    if (lane.state == State::at_barrier) lane.state = State::ready;
}

unsigned sync_block(bool predicate, Where where) {
  Lane& lane = self();
  Block& block = *lane.block;
  const unsigned round = block.round & 1;
  lane.where = where;
  if (block.arrived == 0) block.barrier = where;
  if (block.barrier.line() != where.line())
    fail("threads of a block meet at different barriers, one of them at " + place(block.barrier),
         where);
  block.predicates[round] += predicate;
  block.tokens->barrier[round].release();
  lane.state = State::at_barrier;
  if (++block.arrived == block.alive) open_barrier(block);
  leave(lane);
  block.tokens->barrier[round].acquire();
  return block.predicates[round];
}

uint64_t warp(const WarpCall& call) {
  Lane& lane = self();
  Block& block = *lane.block;
  const unsigned at = lane.rank / 32;
  const unsigned lanes = std::min(32u, grid->shape.threads - at * 32);
  const unsigned there = lanes == 32 ? ~0u : (1u << lanes) - 1;
  if ((call.mask >> lane.lane & 1) == 0) fail("a lane is not in its own mask", call.where);
  if (call.mask & ~there) fail("a mask names lanes that the block does not have", call.where);
  if (call.mask & block.returned[at]) fail("a mask names a lane that has returned", call.where);
  lane.call = call;
  Token& token = block.tokens->warp[at][block.rounds[at] & 1];
  if (call.op == WarpOp::sync) token.release();  // the others order no memory
  lane.state = State::at_warp;
  block.waiting[at] |= 1u << lane.lane;
  const bool last = complete(block, at, call.mask);
  if (!last || options().order == Order::random) leave(lane);
  if (call.op == WarpOp::sync) token.acquire();
  return lane.result;
}

void learn() {
  if (current != nullptr) self().learned = true;
}

void spin(Where where) {
  if (current == nullptr) return;
  learn();
  if (++grid->spins > options().most_spins)
    fail("no progress: threads spin for a condition that no thread sets", where);
  leave(self());
}

void wait_for_host(Where where) {
  if (current == nullptr) return;
  learn();
  if (std::chrono::steady_clock::now() - grid->started > kMostWait)
    fail("no progress: a grid waits for the host", where);
  sched_yield();
  leave(self());
}

void maybe_switch() {
  if (current != nullptr && options().order == Order::random && grid->random.below(4) == 0)
    leave(self());
}

void* shared_memory(const void* key, size_t bytes, size_t alignment) {
  Block& block = *self().block;
  for (const auto& [known, p] : block.objects)
    if (known == key) return p;
  block.static_bytes += bytes;
  if (block.static_bytes > kMostStatic) fail("more than 48 KiB of static shared memory");
  if (block.static_bytes + grid->shape.dynamic_bytes > kMostShared)
    fail("more than 99 KiB of shared memory");
  block.objects.emplace_back(key, carve(block, bytes, alignment));
  return block.objects.back().second;
}

void* dynamic_shared_memory() {
  if (grid->shape.dynamic_bytes == 0) fail("the launch asked for no dynamic shared memory");
  return self().block->dynamic;
}

}  // namespace emulator
