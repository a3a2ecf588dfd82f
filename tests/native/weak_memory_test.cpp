// The product's code without locks over a model of a weak memory (weak_memory.h): every order of
// operations and every value that a load may return. mutations.py weakens the orders one by one.
// `make simulate` runs the long tests.
#include "weak_memory.h"

#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "core/atomic_words.h"
#include "harness.h"
#include "shared/flags.h"
#include "transport/ring_positions.h"

using namespace pycomm;
using weak::Atomics, weak::Data, weak::Socket, weak::require;

namespace {

constexpr uint64_t kMost = 20'000'000;  // executions

struct Pair {
  uint64_t a = 0, b = 0;
};

template <typename S, typename... Arguments>
void holds(int threads, Arguments... arguments) {
  const weak::Result result = weak::explore<S>(threads, kMost, arguments...);
  expect_equal(result.fault, std::string(), "fault");
  expect(result.executions > 1, "one execution only");
}

template <typename S, typename... Arguments>
void fails(const std::string& fault, int threads, Arguments... arguments) {
  expect_equal(weak::explore<S>(threads, kMost, arguments...).fault, fault, "fault");
}

// ---- the model itself: litmus tests

struct MessagePassing final : weak::Scenario {
  MessagePassing(std::memory_order writes, std::memory_order reads)
      : writes_(writes), reads_(reads) {}
  void run(int thread) override {
    if (thread == 0) {
      data_.set(1);
      flag_.store(1, writes_);
    } else if (flag_.load(reads_) == 1) {
      require(data_.get() == 1, "old data");
    }
  }
  std::memory_order writes_, reads_;
  Data<int> data_;
  weak::Atomic<int> flag_;
};

const Test kMessagePassing(
    "model: release and acquire pass a message, and relaxed order does not", [] {
      using enum std::memory_order;
      holds<MessagePassing>(2, release, acquire);
      holds<MessagePassing>(2, seq_cst, seq_cst);
      fails<MessagePassing>("a read races with a write", 2, relaxed, acquire);
      fails<MessagePassing>("a read races with a write", 2, release, relaxed);
    });

struct StoreBuffering final : weak::Scenario {
  StoreBuffering(std::memory_order store, std::memory_order load, bool fence)
      : store_(store), load_(load), fence_(fence) {}
  void run(int thread) override {
    words_[thread].store(1, store_);
    if (fence_) Atomics::store_load_fence();
    saw_[thread] = words_[1 - thread].load(load_);
  }
  void end() override { require(saw_[0] + saw_[1] > 0, "both loads miss the other store"); }
  std::memory_order store_, load_;
  bool fence_;
  weak::Atomic<int> words_[2];
  int saw_[2]{};
};

const Test kStoreBuffering(
    "model: a load passes an earlier store, unless both are sequentially consistent", [] {
      using enum std::memory_order;
      const std::string both = "both loads miss the other store";
      holds<StoreBuffering>(2, seq_cst, seq_cst, false);
      holds<StoreBuffering>(2, relaxed, relaxed, true);
      fails<StoreBuffering>(both, 2, release, acquire, false);
      fails<StoreBuffering>(both, 2, release, seq_cst, false);
      fails<StoreBuffering>(both, 2, seq_cst, acquire, false);
    });

// Two stores to different words, seen by two readers in different orders.
struct IndependentReads final : weak::Scenario {
  IndependentReads(std::memory_order store, std::memory_order load) : store_(store), load_(load) {}
  void run(int thread) override {
    if (thread < 2) return words_[thread].store(1, store_);
    const int first = thread - 2;
    saw_[first] = words_[first].load(load_) == 1 && words_[1 - first].load(load_) == 0;
  }
  void end() override { require(!saw_[0] || !saw_[1], "two orders of the stores"); }
  std::memory_order store_, load_;
  weak::Atomic<int> words_[2];
  bool saw_[2]{};
};

const Test kIndependentReads("model: only sequential consistency gives one order of stores", [] {
  using enum std::memory_order;
  holds<IndependentReads>(4, seq_cst, seq_cst);
  fails<IndependentReads>("two orders of the stores", 4, release, acquire);
});

// Modification order may differ from the order of execution, and coherence holds.
struct Coherence final : weak::Scenario {
  void run(int thread) override {
    using enum std::memory_order;
    if (thread < 2) {
      words_[thread].store(1, relaxed);
      words_[1 - thread].store(2, relaxed);
    } else {
      const int first = word().load(relaxed), second = word().load(relaxed);
      if (first == 1 && second == 2) up_ = true;
      if (first == 2 && second == 1) down_ = true;
      require(!up_ || !down_, "a word changed back");
    }
  }
  void end() override {
    if (words_[0].load() == 1 && words_[1].load() == 1) require(!twice, "both");
  }
  weak::Atomic<int>& word() { return words_[0]; }
  static inline bool twice = false;
  weak::Atomic<int> words_[2];
  bool up_ = false, down_ = false;
};

const Test kCoherence("model: stores of two threads have any order per word, one at a time", [] {
  Coherence::twice = false;
  holds<Coherence>(3);
  Coherence::twice = true;  // 2+2W: each word ends with the first store
  fails<Coherence>("both", 2);
});

struct Exchange final : weak::Scenario {
  void run(int thread) override { got_[thread] = word_.exchange(0, std::memory_order_relaxed); }
  void end() override { require(got_[0] + got_[1] == 1, "not one thread got it"); }
  weak::Atomic<int> word_{1};
  int got_[2]{};
};

const Test kExchange("model: one of two exchanges gets a value", [] { holds<Exchange>(2); });

struct Asleep final : weak::Scenario {
  void run(int thread) override {
    if (thread == 0) return socket_.wait();
    if (word_.load() == 0) word_.store(1);
  }
  Socket socket_;
  weak::Atomic<int> word_;
};

const Test kAsleep("model: a thread that no other one wakes is a fault",
                   [] { fails<Asleep>("a thread waits forever", 2); });

// Random programs: three threads of two or three operations on two words.
struct Random final : weak::Scenario {
  Random(unsigned seed, std::set<std::string>& outcomes) : seed_(seed), outcomes_(outcomes) {}
  void run(int thread) override {
    using enum std::memory_order;
    std::minstd_rand random(seed_ * 4 + static_cast<unsigned>(thread));
    const auto any = [&](unsigned below) { return static_cast<size_t>(random() >> 8) % below; };
    for (size_t i = 0, n = 2 + any(2); i < n; ++i) {
      auto& word = words_[any(2)];
      const int value = 10 * thread + static_cast<int>(i) + 1;
      switch (any(5)) {
        case 0:
        case 1:
          saw(thread, word.load(std::array{relaxed, acquire, seq_cst}[any(3)]));
          break;
        case 2:
          Atomics::store_load_fence();
          break;
        case 3:
          word.store(value, std::array{relaxed, release, seq_cst}[any(3)]);
          break;
        default:
          saw(thread, word.exchange(value, std::array{relaxed, acq_rel, seq_cst}[any(3)]));
      }
    }
  }
  void end() override {
    outcomes_.insert(saw_[0] + "|" + saw_[1] + "|" + saw_[2] + "|" +
                     std::to_string(words_[0].load()) + "," + std::to_string(words_[1].load()));
  }
  void saw(int thread, int value) { saw_[thread] += " " + std::to_string(value); }
  unsigned seed_;
  std::set<std::string>& outcomes_;
  weak::Atomic<int> words_[2];
  std::string saw_[3];
};

const Test kRandom("model: without redundant executions no outcome of a random program is lost",
                   [] {
                     for (unsigned seed = 0; seed < 300; ++seed) {
                       std::set<std::string> some, every;
                       const auto in = [&](std::set<std::string>& outcomes) {
                         return [&outcomes, seed] { return new Random(seed, outcomes); };
                       };
                       (void)weak::explore(3, in(some), kMost);
                       (void)weak::explore(3, in(every), kMost, true);
                       expect(some == every, "seed " + std::to_string(seed) + ": " +
                                                 std::to_string(some.size()) + " of " +
                                                 std::to_string(every.size()) + " outcomes");
                     }
                   });

// ---- core/atomic_words.h

struct Publishing final : weak::Scenario {
  Publishing(uint64_t writes, uint64_t reads) : writes_(writes), reads_(reads) {}
  void run(int thread) override {
    if (thread == 0)
      for (uint64_t i = 1; i <= writes_; ++i) {
        written_[i].set(1);
        published_.store({i, i});
      }
    else
      for (uint64_t i = 0; i < reads_; ++i) {
        const auto value = published_.try_load();
        if (!value) continue;
        require(value->a == value->b, "half a value");
        require(value->a >= last_[thread], "an older value");
        last_[thread] = value->a;
        if (value->a > 0) (void)written_[value->a].get();
      }
  }
  uint64_t writes_, reads_;
  Published<Pair, AtomicWords<Pair, Atomics>, Atomics> published_;
  Data<int> written_[4];
  uint64_t last_[3]{};
};

const Test kPublishing("a published value is whole, and never an older one",
                       [] { holds<Publishing>(2, uint64_t{2}, uint64_t{1}); });
const Test kPublishingLong("long: a published value, read twice",
                           [] { holds<Publishing>(2, uint64_t{2}, uint64_t{2}); });

// ---- transport/ring_positions.h

struct Ring final : weak::Scenario {
  Ring(size_t bytes, int messages)
      : bytes_(bytes), messages_(messages), writer_(head_, bytes), reader_(head_) {}
  void run(int thread) override { thread == 0 ? write() : read(); }
  void write() {
    for (int i = 0; i < messages_; ++i) {
      while (writer_.space() == 0) {
        writer_.arm();
        if (writer_.space() == 0) wakes_writer_.wait();
        writer_.disarm();
      }
      ring_[writer_.position() % bytes_].set(i);
      if (writer_.publish(1)) wakes_reader_.wake();
    }
  }
  void read() {
    for (int i = 0; i < messages_; ++i) {
      while (reader_.available() == 0) {
        reader_.arm();
        if (reader_.available() == 0) wakes_reader_.wait();
        reader_.disarm();
      }
      require(reader_.available() <= bytes_, "more than the ring has");
      require(ring_[reader_.position() % bytes_].get() == i, "another byte");
      if (reader_.take(1)) wakes_writer_.wake();
    }
  }
  size_t bytes_;
  int messages_;
  transport::RingHead<Atomics> head_;
  transport::RingWriter<Atomics> writer_;
  transport::RingReader<Atomics> reader_;
  Data<int> ring_[2];
  Socket wakes_writer_, wakes_reader_;
};

const Test kRing("a ring of one byte: each byte arrives, and no wake-up is lost",
                 [] { holds<Ring>(2, size_t{1}, 2); });
const Test kRingOfTwo("long: a ring of two bytes, with three messages",
                      [] { holds<Ring>(2, size_t{2}, 3); });

// ---- shared/flags.h

// A rank as FlagTask uses its segment.
template <int kSlots>
struct Rank {
  shared::Flag<Atomics> filled[kSlots], done, reduced;
  shared::CurrentCall<uint64_t, Atomics> call;
  SleepFlag<Atomics> sleeps;
  Data<uint64_t> slots[kSlots];
  Socket socket;
};

template <typename Ranks>
void wait_for(Ranks& ranks, int own, const shared::Flag<Atomics>& flag, uint64_t need) {
  while (!flag.reached(need)) {
    ranks[own].sleeps.arm();
    if (!flag.reached(need)) ranks[own].socket.wait();
    ranks[own].sleeps.disarm();
  }
}

template <typename Ranks>
void wake(Ranks& ranks, int own) {
  shared::wake_sleepers<Atomics>(
      static_cast<int>(std::size(ranks)), own,
      [&](int i) -> SleepFlag<Atomics>& { return ranks[i].sleeps; },
      [&](int i) {
        if (i != own) ranks[i].socket.wake();  // there is no link to the rank itself
      });
}

// Rank 0 fills slots, the others read them; a slot is filled again after all have read it.
template <int kRanks, int kSlots>
struct Slots final : weak::Scenario {
  explicit Slots(uint64_t tickets) : tickets_(tickets) {}
  void run(int thread) override {
    for (uint64_t ticket = 0; ticket < tickets_; ++ticket) {
      if (thread == 0)
        fill(ticket);
      else
        read(thread, ticket);
    }
  }
  void fill(uint64_t ticket) {
    for (int peer = 1; peer < kRanks && ticket >= kSlots; ++peer)
      wait_for(ranks_, 0, ranks_[peer].done, ticket + 1 - kSlots);
    ranks_[0].slots[ticket % kSlots].set(ticket);
    ranks_[0].filled[ticket % kSlots].raise(ticket + 1);
    wake(ranks_, 0);
  }
  void read(int rank, uint64_t ticket) {
    wait_for(ranks_, rank, ranks_[0].filled[ticket % kSlots], ticket + 1);
    require(ranks_[0].slots[ticket % kSlots].get() == ticket, "the data of another ticket");
    ranks_[rank].done.raise(ticket + 1);
    wake(ranks_, rank);
  }
  uint64_t tickets_;
  Rank<kSlots> ranks_[kRanks];
};

const Test kSlots("a slot is read after it was filled, and filled again after it was read",
                  [] { holds<Slots<2, 1>>(2, uint64_t{2}); });
const Test kSlotsOfThree("long: a filled slot wakes two readers",
                         [] { holds<Slots<3, 1>>(3, uint64_t{1}); });

// Two ranks raise their flags, a third one sleeps until it has both.
struct TwoWakers final : weak::Scenario {
  void run(int thread) override {
    if (thread == 0) {
      for (int peer = 1; peer < 3; ++peer) wait_for(ranks_, 0, ranks_[peer].reduced, 1);
      return;
    }
    ranks_[thread].reduced.raise(1);
    wake(ranks_, thread);
  }
  Rank<1> ranks_[3];
};

const Test kTwoWakers("one of two ranks wakes a third one that waits for both",
                      [] { holds<TwoWakers>(3); });

// A task advances once more between arm() and its sleep, and may raise a flag there.
struct RaiseWhileArmed final : weak::Scenario {
  void run(int thread) override {
    if (thread == 0) {
      ranks_[0].sleeps.arm();
      if (!ranks_[1].reduced.reached(1)) {
        ranks_[0].reduced.raise(1);
        wake(ranks_, 0);
        if (!ranks_[1].reduced.reached(1)) ranks_[0].socket.wait();
      }
      ranks_[0].sleeps.disarm();
    } else {
      ranks_[1].reduced.raise(1);
      wake(ranks_, 1);
    }
  }
  Rank<1> ranks_[2];
};

const Test kRaiseWhileArmed("a rank that raises a flag does not claim its own sleep",
                            [] { holds<RaiseWhileArmed>(2); });

// Zero-copy: the ranks exchange the addresses of their arrays, each reads the other's input and
// writes one piece of both outputs; then all change their arrays.
struct Meeting final : weak::Scenario {
  void run(int own) override {
    const int peer = 1 - own;
    Rank<1>&mine = ranks_[own], &theirs = ranks_[peer];
    const auto wait = [](const shared::Flag<Atomics>& flag) {
      while (!flag.reached(1)) weak::retry();
    };
    inputs_[own].set(own + 1);
    mine.call.publish(7, 7);
    mine.slots[0].set(100);  // the address
    mine.filled[0].raise(1);
    wait(theirs.filled[0]);
    require(theirs.slots[0].get() == 100, "the address of another call");
    while (theirs.call.number() != 7) weak::retry();
    const int sum = inputs_[own].get() + inputs_[peer].get();
    outputs_[own][own].set(sum);
    outputs_[peer][own].set(sum);
    mine.reduced.raise(1);
    wait(theirs.reduced);
    mine.done.raise(1);
    for (auto& piece : outputs_[own]) {
      require(piece.get() == 3, "another sum");
      piece.set(0);
    }
    inputs_[own].set(0);
    mine.call.withdraw();
  }
  Rank<1> ranks_[2];
  Data<int> inputs_[2], outputs_[2][2];
};

const Test kMeeting("ranks use each other's arrays between the exchange and the last flag",
                    [] { holds<Meeting>(2); });

// What a rank did before it published a call, a rank that finds it in that call sees.
struct Calls final : weak::Scenario {
  explicit Calls(bool whole) : whole_(whole) {}
  void run(int thread) override {
    if (thread == 0) {
      for (uint64_t call = 1; call <= 2; ++call) {
        arrays_[call].set(1);
        call_.publish(call, {call, call});
      }
      call_.withdraw();
    } else if (whole_) {
      const auto call = call_.read();
      require(!call || (call->number == call->header.a && call->header.a == call->header.b),
              "a header of another call");
    } else if (const uint64_t number = call_.number(); number > 0) {
      (void)arrays_[number].get();
    }
  }
  bool whole_;
  shared::CurrentCall<Pair, Atomics> call_;
  Data<int> arrays_[3];
};

const Test kCalls("the number of a rank's call has its header and its arrays", [] {
  holds<Calls>(2, true);
  holds<Calls>(2, false);
});

// ---- observe/flight_recorder.cpp, in its words: test_weak_memory.py compares the source

// Another process reads `begun`, the records and `begun` again, and drops the records that were
// overwritten meanwhile and the one that is next.
struct Recorder final : weak::Scenario {
  static constexpr uint64_t kKept = 2, kCalls = 4;
  explicit Recorder(bool fence) : fence_(fence) {}
  void run(int thread) override {
    if (thread == 0)
      for (uint64_t call = 0; call < kCalls; ++call) begin(call);
    else
      read();
  }
  void begin(uint64_t call) {
    if (fence_) Atomics::release_fence();
    for (auto& word : records_[call % kKept]) word.store(call + 1, std::memory_order_relaxed);
    begun_.store(call + 1, std::memory_order_release);
  }
  void read() {
    const uint64_t before = begun_.load(std::memory_order_acquire);
    uint64_t words[kKept][2];
    for (uint64_t slot = 0; slot < kKept; ++slot)
      for (int i = 0; i < 2; ++i)
        words[slot][i] = records_[slot][i].load(std::memory_order_acquire);
    const uint64_t after = begun_.load(std::memory_order_relaxed);
    for (uint64_t call = after < kKept ? 0 : after + 1 - kKept; call < before; ++call)
      for (const uint64_t word : words[call % kKept]) require(word == call + 1, "another call");
  }
  bool fence_;
  weak::Atomic<uint64_t> begun_, records_[kKept][2];
};

const Test kRecorder("a reader of the flight recorder drops every record that changes", [] {
  holds<Recorder>(2, true);
  fails<Recorder>("another call", 2, false);
});

}  // namespace
