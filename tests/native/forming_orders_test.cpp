// How ranks form a mesh (bootstrap/forming.h), in a network of this file: scripts that can be read
// without the code, and every order of events of up to 4 ranks.
//
// A connection is complete at one end before the other. The network is faster than the limits of
// forming.h: time passes when nothing else can happen.
#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#include "bootstrap/forming.h"
#include "harness.h"

namespace {

using namespace pycomm::bootstrap;
using namespace std::chrono_literals;
using Result = Forming::Result;
using Time = Forming::Time;

constexpr Time kLimit = 5s;

std::string text_of(const Forming::Verdict& verdict) {
  constexpr std::array names{"waits",  "complete", "different",   "unreachable",
                             "closed", "died",     "interrupted", "late"};
  const std::string name = names.at(static_cast<size_t>(verdict.result));
  return verdict.peer < 0 ? name : name + " " + std::to_string(verdict.peer);
}

std::vector<int> others(int rank, int size) {
  std::vector<int> found;
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) found.push_back(peer);
  return found;
}

// Clauses: "dials 0 1" compares the peers to dial from now on, "-> died 2" the verdict.
void run(int rank, int size, const std::string& script) {
  Forming forming(rank, others(rank, size), kLimit);
  Time now{};
  std::istringstream clauses(script);
  for (std::string clause; std::getline(clauses, clause, ';');) {
    std::istringstream words(clause);
    std::string word;
    int value = -1;
    words >> word >> value;
    const std::string rest = clause.substr(clause.find(word) + word.size());
    if (word == "->") {
      expect_equal(" " + text_of(forming.verdict(now)), rest, script);
    } else if (word == "dials") {
      std::string found;
      for (const int peer : forming.dials(now)) found += " " + std::to_string(peer);
      expect_equal(found, rest, script);
    } else if (word == "ms") {
      now += std::chrono::milliseconds(value);
    } else if (word == "connects") {
      forming.connected(value);
    } else if (word == "closes") {
      forming.closed(value, now);
    } else if (word == "ends") {
      forming.ended(value, now);
    } else if (word == "unreachable") {
      forming.unreachable(value);
    } else if (word == "different") {
      forming.different(value);
    } else {
      expect(word == "interrupted", clause);
      forming.interrupted();
    }
  }
}

const Test kCompletes("a rank dials the lower ranks and accepts the higher ones", [] {
  run(1, 3, "dials 0;connects 2;dials;-> waits;connects 0;-> complete");
  run(0, 2, "dials;connects 1;-> complete");
});

const Test kDialsBack("after a second a rank dials the higher ranks too", [] {
  run(1, 4, "dials 0;connects 2;ms 999;dials;ms 1;dials 3;dials;connects 3;connects 0;-> complete");
});

const Test kCloses("a connected rank that closes is the cause, once no other is about to connect",
                   [] {
                     run(1, 4, "connects 0;closes 0;-> waits 0;ms 199;-> waits 0;ms 1;-> closed 0");
                     run(1, 4, "connects 0;closes 0;connects 2;-> waits 0;connects 3;-> closed 0");
                     run(1, 4, "connects 0;closes 0;ms 100;closes 2;ms 100;-> closed 0");
                   });

const Test kDies("a rank whose process ended is named, unless one says why", [] {
  run(1, 3, "ends 2;-> waits;ms 200;-> died 2");
  run(1, 3, "connects 0;ends 2;ms 100;closes 0;ms 100;-> waits 0;ms 100;-> closed 0");
  run(1, 3, "ends 2;ms 100;ends 0;ms 100;-> died 2");
});

const Test kUnreachable("a rank that cannot be reached is named at once", [] {
  run(2, 3, "unreachable 0;-> unreachable 0");
  run(2, 3, "connects 1;closes 1;unreachable 0;-> closed 1");
});

const Test kDifferent("other rank infos are the first cause", [] {
  run(1, 3, "connects 0;closes 0;different 2;-> different 2");
  run(1, 2, "connects 0;different 0;-> different 0");
});

const Test kLimits("the limit and an interruption end only a group that can still form", [] {
  run(1, 2, "ms 4999;-> waits;ms 1;-> late");
  run(1, 2, "interrupted;-> interrupted");
  run(1, 2, "connects 0;interrupted;ms 5000;-> complete");
  run(1, 3, "connects 0;ms 4900;closes 0;ms 100;interrupted;-> waits 0;ms 100;-> closed 0");
});

// Ranks, by bit.
struct Ranks {
  unsigned bits = 0;
  bool contains(int rank) const { return bits >> rank & 1; }
  void insert(int rank) { bits |= 1u << rank; }
};

// A rank in the network.
struct Rank {
  Forming forming;
  Time now{};
  bool alive = true, stopped = false;
  Ranks dials{}, connected{}, closed{}, ended{};
  Ranks told{};  // peers that get the cause if this rank fails
  Forming::Verdict verdict{};
  std::string observed{};  // the first of each kind, and when: what decides later verdicts

  bool runs() const { return alive && !stopped && verdict.result == Result::waits; }
  bool failed() const {
    return verdict.result != Result::waits && verdict.result != Result::complete;
  }
  void observe(char kind, int peer) {
    if (observed.find(kind) == std::string::npos)
      observed += kind + std::to_string(peer) + "@" + std::to_string(now.count());
  }
};

struct World {
  std::vector<Rank> ranks;
  std::set<std::pair<int, int>> cut{};  // dialer and listener: no connection
  int deaths = 0, stops = 0, interruptions = 0;

  Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
  std::string key() const {
    std::ostringstream text;
    text << deaths << stops << interruptions;
    for (const Rank& rank : ranks)
      text << '|' << rank.now.count() << rank.alive << rank.stopped << ' ' << rank.dials.bits << ' '
           << rank.connected.bits << ' ' << rank.closed.bits << ' ' << rank.ended.bits << ' '
           << rank.told.bits << rank.observed << static_cast<int>(rank.verdict.result)
           << rank.verdict.peer;
    return text.str();
  }
};

// The rank dials, and ends if it can.
void decide(World& world, int rank) {
  Rank& own = world.at(rank);
  if (!own.runs()) return;
  for (const int peer : own.forming.dials(own.now)) own.dials.insert(peer);
  own.verdict = own.forming.verdict(own.now);
  if (own.failed()) own.told = own.connected;
}

World world_of(int size, int deaths, int stops, int interruptions) {
  World world{.ranks = {}, .deaths = deaths, .stops = stops, .interruptions = interruptions};
  for (int rank = 0; rank < size; ++rank)
    world.ranks.push_back({.forming = Forming(rank, others(rank, size), kLimit)});
  for (int rank = 0; rank < size; ++rank) decide(world, rank);
  return world;
}

template <typename Change>
void after(std::vector<World>& found, const World& world, int rank, Change change) {
  World next = world;
  change(next, next.at(rank));
  decide(next, rank);
  found.push_back(std::move(next));
}

// What may happen between a rank and a peer.
void add_events(std::vector<World>& found, World& world, int rank, int peer) {
  Rank &own = world.at(rank), &other = world.at(peer);
  if (!own.alive || own.stopped) return;
  const bool met = own.connected.contains(peer), was_met = other.connected.contains(rank);
  const bool mine = own.dials.contains(peer), may_dial = !world.cut.contains({rank, peer});
  const bool theirs = other.dials.contains(rank) && !world.cut.contains({peer, rank});
  if (own.runs() && !met && (was_met || (other.runs() && ((mine && may_dial) || theirs))))
    after(found, world, rank, [&](World&, Rank& one) {
      one.connected.insert(peer);
      one.forming.connected(peer);
    });
  if (met && (!other.alive || other.failed()) && !own.closed.contains(peer))
    after(found, world, rank, [&](World&, Rank& one) {
      one.closed.insert(peer);
      one.observe('c', peer);
      one.forming.closed(peer, one.now);
    });
  if (own.runs() && !other.alive && !own.ended.contains(peer))
    after(found, world, rank, [&](World&, Rank& one) {
      one.ended.insert(peer);
      one.observe('e', peer);
      one.forming.ended(peer, one.now);
    });
}

// A peer counts as unreachable after many refused dials, for some seconds, if it is lower.
void add_refusals(std::vector<World>& found, World& world, int rank, int peer) {
  Rank &own = world.at(rank), &other = world.at(peer);
  const bool refused = !other.alive || other.failed() || world.cut.contains({rank, peer});
  if (own.runs() && refused && peer < rank && own.dials.contains(peer) &&
      !own.connected.contains(peer) && !own.closed.contains(peer))
    after(found, world, rank, [&](World&, Rank& one) {
      one.closed.insert(peer);
      one.observe('u', peer);
      one.forming.unreachable(peer);
    });
}

std::vector<World> following(World& world) {
  std::vector<World> found;
  const int size = static_cast<int>(world.ranks.size());
  for (int rank = 0; rank < size; ++rank)
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank) add_events(found, world, rank, peer);
  Time first = Time::max();  // clocks run alike
  for (const Rank& rank : world.ranks)
    if (rank.runs()) first = std::min(first, rank.now);
  if (found.empty())
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; first >= 1s && peer < size; ++peer) add_refusals(found, world, rank, peer);
      if (world.at(rank).runs() && world.at(rank).now == first)
        after(found, world, rank,
              [](World&, Rank& own) { own.now += own.now < 1s ? Time(200ms) : Time(4s); });
    }
  for (int rank = 0; rank < size; ++rank) {
    if (!world.at(rank).alive || world.at(rank).stopped) continue;
    if (world.deaths > 0)
      after(found, world, rank, [](World& all, Rank& own) { own.alive = false, --all.deaths; });
    if (world.stops > 0)
      after(found, world, rank, [](World& all, Rank& own) { own.stopped = true, --all.stops; });
    if (world.interruptions > 0 && world.at(rank).runs())
      after(found, world, rank, [](World& all, Rank& own) {
        own.observe('i', -1), own.forming.interrupted(), --all.interruptions;
      });
  }
  return found;
}

// The ranks that the error of this rank names: its own finding, or that of a peer that told it.
std::set<int> named(World& world, int rank, int depth = 0) {
  const Rank& own = world.at(rank);
  const int peer = own.verdict.peer;
  if (own.verdict.result == Result::interrupted) return {rank};
  if (own.verdict.result == Result::late)
    return {own.forming.missing().begin(), own.forming.missing().end()};
  if (own.verdict.result == Result::closed && world.at(peer).told.contains(rank) && depth < 4)
    return named(world, peer, depth + 1);
  return {peer};
}

// Each rank ended, and names only missing ranks. If one completed, each other one completes or has
// a closed connection.
void check_end(World& world) {
  const int size = static_cast<int>(world.ranks.size());
  bool complete = false, failed = false;
  for (int rank = 0; rank < size; ++rank) {
    Rank& own = world.at(rank);
    complete |= own.alive && own.verdict.result == Result::complete;
    failed |= !own.alive || own.failed();
    if (!own.alive || own.stopped) continue;
    expect(own.verdict.result != Result::waits, "rank " + std::to_string(rank) + " waits");
    if (!own.failed()) continue;
    expect(world.cut.size() != 1, "a rank does not dial back: " + text_of(own.verdict));
    for (const int peer : named(world, rank)) {
      const Rank& other = world.at(peer);
      const bool cut = std::ranges::any_of(
          world.cut, [&](const auto& pair) { return pair.first == peer || pair.second == peer; });
      const bool interrupted = other.verdict.result == Result::interrupted;
      expect(!other.alive || other.stopped || cut || interrupted,
             "rank " + std::to_string(rank) + " names rank " + std::to_string(peer) + ": " +
                 text_of(own.verdict));
    }
  }
  for (Rank& own : world.ranks)
    if (complete && failed && own.alive && !own.stopped)
      expect(own.failed() || own.closed.bits != 0, "a rank has no closed connection");
}

// Checks the world if no rank can do anything more; returns what may happen.
std::vector<World> checked(World& world) {
  std::vector<World> next = following(world);
  const bool acts = std::ranges::any_of(next, [&](const World& one) {
    return one.deaths == world.deaths && one.stops == world.stops &&
           one.interruptions == world.interruptions;
  });
  if (!acts) check_end(world);
  return next;
}

// Returns the number of worlds.
size_t explore(World first) {
  std::unordered_set<std::string> seen;
  std::vector<World> todo{std::move(first)};
  while (!todo.empty()) {
    World world = std::move(todo.back());
    todo.pop_back();
    if (!seen.insert(world.key()).second) continue;
    std::vector<World> next = checked(world);
    std::ranges::move(next, std::back_inserter(todo));
  }
  return seen.size();
}

const Test kOrders("every order of events", [] {
  for (const int size : {1, 2, 3, 4}) (void)explore(world_of(size, 0, 0, 0));
  for (const int size : {2, 3}) {
    (void)explore(world_of(size, 1, 0, 0));
    (void)explore(world_of(size, 0, 1, 0));
    (void)explore(world_of(size, 0, 0, 1));
  }
  expect(explore(world_of(3, 1, 1, 0)) > 10'000, "explored");
});

const Test kRandom("random orders of events of more ranks", [] {
  std::mt19937 random(1);
  for (int walk = 0; walk < 2000; ++walk) {
    World world = world_of(4 + walk % 3, walk % 3, walk % 2, walk % 5 == 0);
    for (std::vector<World> next = checked(world); !next.empty(); next = checked(world))
      world = next[random() % next.size()];
  }
});

const Test kCuts("every order of events if two ranks cannot connect, in one direction or both", [] {
  for (const bool both : {false, true}) {
    World world = world_of(3, 0, 0, 0);
    world.cut.insert({2, 0});
    if (both) world.cut.insert({0, 2});
    (void)explore(world);
  }
});

}  // namespace
