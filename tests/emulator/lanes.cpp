// Warp operations once all their lanes have arrived, and the report of a deadlocked grid.
#include "lanes.hpp"

#include <algorithm>
#include <bit>
#include <string_view>

namespace emulator {
namespace {

constexpr std::array<std::string_view, 9> kNames{
    "__syncwarp",  "__ballot_sync",  "__all_sync",       "__any_sync",     "__match_any_sync",
    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};

std::string_view name(WarpOp op) { return kNames[static_cast<size_t>(op)]; }

using Lanes = std::array<Lane*, 32>;

template <class F>
void each(unsigned mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(static_cast<unsigned>(std::countr_zero(mask)));
}

// The lane that a shuffle reads.
unsigned source(const Lane& lane) {
  const WarpCall& call = lane.call;
  const unsigned width = call.width, at = lane.lane, first = at & ~(width - 1);
  switch (call.op) {
    case WarpOp::shuffle:
      return first + (call.argument & (width - 1));
    case WarpOp::up:
      return at >= first + call.argument ? at - call.argument : at;
    case WarpOp::down:
      return at + call.argument < first + width ? at + call.argument : at;
    case WarpOp::across:
      return (at ^ call.argument) < first + width ? at ^ call.argument : at;
    case WarpOp::sync:
    case WarpOp::ballot:
    case WarpOp::all:
    case WarpOp::any:
    case WarpOp::match:
      break;
  }
  return at;
}

void shuffle(const Lanes& lanes, unsigned mask) {
  each(mask, [&](unsigned i) {
    const unsigned from = source(*lanes[i]);
    if ((mask >> from & 1) == 0)
      fail("a shuffle reads a lane outside its mask", lanes[i]->call.where);
    lanes[i]->result = lanes[from]->call.value;
  });
}

void vote(const Lanes& lanes, unsigned mask, WarpOp op) {
  unsigned yes = 0;
  each(mask, [&](unsigned i) { yes |= static_cast<unsigned>(lanes[i]->call.value != 0) << i; });
  const uint64_t result = op == WarpOp::all ? yes == mask : op == WarpOp::any ? yes != 0 : yes;
  each(mask, [&](unsigned i) { lanes[i]->result = result; });
}

void match(const Lanes& lanes, unsigned mask) {
  each(mask, [&](unsigned i) {
    unsigned same = 0;
    each(mask, [&](unsigned j) {
      same |= static_cast<unsigned>(lanes[j]->call.value == lanes[i]->call.value) << j;
    });
    lanes[i]->result = same;
  });
}

void finish(const Lanes& lanes, unsigned mask, WarpOp op) {
  switch (op) {
    case WarpOp::sync:
      return;
    case WarpOp::ballot:
    case WarpOp::all:
    case WarpOp::any:
      return vote(lanes, mask, op);
    case WarpOp::match:
      return match(lanes, mask);
    case WarpOp::shuffle:
    case WarpOp::up:
    case WarpOp::down:
    case WarpOp::across:
      return shuffle(lanes, mask);
  }
}

bool alike(const Lane& a, const Lane& b) {
  if (a.state != b.state) return false;
  if (a.state == State::at_barrier) return a.where.line() == b.where.line();
  if (a.state == State::at_warp)
    return a.call.where.line() == b.call.where.line() && a.call.mask == b.call.mask;
  return true;
}

}  // namespace

bool complete(Block& block, unsigned warp, unsigned mask) {
  if ((block.waiting[warp] & mask) != mask) return false;
  Lanes at{};
  for (unsigned i = 0; i < 32 && warp * 32 + i < block.lanes.size(); ++i)
    at[i] = &block.lanes[warp * 32 + i];
  const unsigned first = static_cast<unsigned>(std::countr_zero(mask));
  bool together = true;
  each(mask, [&](unsigned i) { together &= at[i]->call.mask == mask; });
  if (!together) return false;  // some still belong to another group
  each(mask, [&](unsigned i) {
    if (at[i]->call.op != at[first]->call.op)
      fail("lanes of one mask meet at different warp operations", at[i]->call.where);
  });
  finish(at, mask, at[first]->call.op);
  each(mask, [&](unsigned i) { at[i]->state = State::ready; });
  block.waiting[warp] &= ~mask;
  ++block.rounds[warp];
  return true;
}

std::string place(const Where& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

std::string describe(const Lane& lane) {
  std::string text = "  block " + std::to_string(lane.block_index.x) + " thread " +
                     std::to_string(lane.rank) + ": ";
  switch (lane.state) {
    case State::ready:
      return text + "running\n";
    case State::done:
      return text + "returned\n";
    case State::at_barrier:
      return text + "__syncthreads at " + place(lane.where) + "\n";
    case State::at_warp:
      break;
  }
  static constexpr char kHex[] = "0123456789abcdef";
  std::string mask = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) mask += kHex[lane.call.mask >> shift & 15];
  return text + std::string(name(lane.call.op)) + " with mask " + mask + " at " +
         place(lane.call.where) + "\n";
}

std::string deadlock(const Grid& grid) {
  std::string text = "deadlock: no thread of the grid can run\n";
  for (unsigned b = 0; b < grid.resident; ++b) {
    const Block& block = *grid.blocks[b];
    if (!block.running) continue;
    for (unsigned i = 0; i < grid.shape.threads;) {
      unsigned next = i + 1;
      while (next < grid.shape.threads && alike(block.lanes[i], block.lanes[next])) ++next;
      text += describe(block.lanes[i]);
      if (next - i > 1) text += "    and " + std::to_string(next - i - 1) + " more like it\n";
      i = next;
    }
  }
  return text;
}

}  // namespace emulator
