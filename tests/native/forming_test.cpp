// A group that does not form: a rank that learns the reason tells its peers, whether these still
// form the group or are done. store_keys_test.cpp tests the keys that stay in the store.
#include <atomic>
#include <latch>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/connector.h"
#include "bootstrap/mesh.h"
#include "bootstrap/rank_info.h"
#include "engine/engine.h"
#include "group/connect.h"
#include "group/host_group.h"
#include "harness.h"
#include "os/socket.h"
#include "ranks.h"
#include "transport/handshake.h"
#include "transport/tcp.h"

namespace {

using namespace pycomm;
using namespace pycomm::bootstrap;
using namespace pycomm::group;
using namespace ranks;
using namespace std::chrono_literals;

constexpr int kSize = 3;

// The rank info of present ranks, and for rank 2 a copy of rank 1's. Rank 2 will not connect.
struct Notes {
  std::latch left{kSize - 1};
  std::vector<std::string> texts = std::vector<std::string>(kSize);
  std::vector<std::string> exchange(int rank, const std::string& mine) {
    texts[static_cast<size_t>(rank)] = mine;
    if (rank == 1) texts[2] = mine;
    left.arrive_and_wait();
    return texts;
  }
};

MeshRequest request_of(int rank, const std::string& by) {
  return {.rank = rank,
          .size = kSize,
          .name = "half",
          .key = std::string(32, 'k'),
          .transport = by,
          .address = {},
          .towards = {},
          .memory_bytes = 4096,
          .shares = false,
          .options = {},
          .tuned = {},
          .log = {}};
}

// The others see it too, before any connection.
const Test kFewDescriptors("a rank without enough descriptors is named by all", [] {
  for (const std::string by : {"shm", "tcp"}) {
    Notes infos;
    run(kSize - 1, [&](int rank) {
      const auto exchange = [&](const std::string& mine) {
        RankInfo info = decode_rank_info(mine);
        if (rank == 1) info.descriptors = "20";
        return infos.exchange(rank, encode(info));
      };
      ending_of([&] {
        (void)form_mesh(request_of(rank, by), exchange, Deadline(60s));
      }).check(ErrorKind::unsupported, {"rank 1 (host", "ulimit -n"}, 1);
    });
  }
});

const Test kLate("a rank that aborts forming says why", [] {
  for (const std::string by : {"shm", "tcp"}) {
    Notes infos;
    run(kSize - 1, [&](int rank) {
      const auto ending = ending_of([&] {
        (void)form_mesh(
            request_of(rank, by),
            [&](const std::string& mine) { return infos.exchange(rank, mine); },
            Deadline(rank == 1 ? 300ms : 60s));
      });
      ending.check(ErrorKind::timeout, {"rank 2"});
      if (rank == 0) expect(ending.says("as rank 1"), ending.text());
      expect(ending.seconds < 30, "it waited for its own limit");
    });
  }
});

// Rank 0's channels when it is connected with rank 1 and does not wait for rank 2.
std::vector<std::unique_ptr<transport::Channel>> meet_rank_1(Notes& infos,
                                                             const MeshRequest& request) {
  Connector::Options connector;
  connector.key = request.key;
  connector.transports.push_back(transport::make_tcp("", ""));
  RankInfo mine = own_rank_info({});
  mine.tcp = connector.transports[0]->address();
  mine.memory = mine.heap = "0";
  mine.token = "token";
  std::vector<RankInfo> all;
  for (const std::string& text : infos.exchange(0, encode(mine)))
    all.push_back(decode_rank_info(text));
  connector.context = context_of(mine, request.name);
  connector.agreed = digest_of(all);
  for (int i = 0; i < kSize; ++i)
    connector.addresses.push_back({i == 0 ? nullptr : connector.transports[0].get(), {}, "rank"});
  Connector meeting(std::move(connector));
  std::vector<std::unique_ptr<transport::Channel>> channels(kSize);
  for (const Deadline deadline(60s); !channels[1];) {
    expect(!deadline.expired(), "rank 1 does not connect");
    std::vector<pollfd> also;
    for (engine::ConnectResult& arrival : meeting.poll(100ms, also))
      channels[static_cast<size_t>(arrival.peer)] = std::move(arrival.channel);
  }
  return channels;
}

// Rank 1 has met only rank 0 when rank 0 closes its connection.
const Test kGone("a rank that closes during forming is named, with its message", [] {
  for (const bool gives_reason : {true, false}) {
    Notes infos;
    run(kSize - 1, [&](int rank) {
      const auto request = request_of(rank, "tcp");
      if (rank == 0) {
        engine::EngineOptions options;
        options.names = {"rank 0", "rank 1", "rank 2"};
        engine::Engine engine(meet_rank_1(infos, request), options);
        if (gives_reason) engine.fail(PeerLost("rank 2 is ill", {.peer = 2}));
        return;
      }
      const auto ending = ending_of([&] {
        (void)form_mesh(
            request, [&](const std::string& mine) { return infos.exchange(rank, mine); },
            Deadline(60s));
      });
      expect(ending.is(ErrorKind::peer_lost) && ending.error->fields().op == "init", ending.text());
      expect(ending.error->fields().peer == (gives_reason ? 2 : 0), ending.text());
      expect(ending.says(gives_reason ? "rank 2 is ill" : "closed the group"), ending.text());
    });
  }
});

// Rank 0's info as given to rank 1: with other thresholds for the choice of algorithms.
std::string with_other_thresholds(const std::string& text) {
  RankInfo info = decode_rank_info(text);
  info.tuned = {{"tcp", {1, 2}}};
  return encode(info);
}

ConnectOptions options_of_two(std::chrono::nanoseconds timeout, int rank = 0) {
  ConnectOptions options;
  options.rank = rank;
  options.size = 2;
  options.timeout = timeout;
  options.secret = "the key";
  options.transport = "tcp";
  return options;
}

const Test kDifferent(
    "ranks that were given different rank info do not form a group, and both say why", [] {
      for (const std::string by : {"shm", "tcp", "local"}) {
        for (const bool differ : {false, true}) {
          std::vector<std::string> texts(2);
          std::latch left{2};
          run(2, [&](int rank) {
            ConnectOptions options = options_of_two(60s, rank);
            options.transport = by;
            const auto exchange = [&](const std::string& mine) {
              texts[static_cast<size_t>(rank)] = mine;
              left.arrive_and_wait();
              auto all = texts;
              if (differ && rank == 1) all[0] = with_other_thresholds(all[0]);
              return all;
            };
            const auto ending = ending_of([&] { (void)make_group(options, exchange, {}); });
            if (!differ) return expect(!ending.error, by + ": " + ending.text());
            // The later of two threads tells the earlier, which is connected already.
            expect(by == "local" || ending.is(ErrorKind::mismatch), by + ": " + ending.text());
            expect(ending.says("different rank infos"), by + ": " + ending.text());
            expect(ending.seconds < 30, "it waited for its own limit");
          });
        }
      }
    });

// Ranks are renumbered in a subgroup: the rank that the parent names is another one in it.
const Test kEnded(
    "the end of the parent ends the forming of a subgroup, seen there or told by a peer", [] {
      for (int rounds = 0; rounds < 4; ++rounds) {
        Notes infos;
        std::atomic<bool> ended{false};
        run(kSize - 1, [&](int rank) {
          ConnectOptions options = options_of_two(60s, rank);
          options.size = kSize;
          int round = 0;
          const CheckAborted check_aborted = [&](std::chrono::nanoseconds) {
            if (rank == 1 && round++ == rounds) ended = true;
            if (ended) throw PeerLost("we have lost rank 0", {.op = "split", .peer = 0});
          };
          const auto ending = ending_of([&] {
            (void)make_group(
                options, [&](const std::string& mine) { return infos.exchange(rank, mine); }, {},
                check_aborted);
          });
          ending.check(ErrorKind::peer_lost, {"we have lost rank 0"});
          expect(ending.error->fields().peer == 0 && ending.error->fields().op == "split",
                 ending.text());
        });
      }
    });

// Rank 1 connects, and leaves before its end of the connection is established; in the round in
// which rank 0 sees that, it also learns that the parent group ended.
const Test kBoth("the end of the parent is reported before the ranks that left because of it", [] {
  MeshRequest request = request_of(0, "shm");
  request.size = 2;
  std::optional<transport::Handshake> call;
  bool gone = false;
  request.check_aborted = [&](std::chrono::nanoseconds) {
    if (gone) throw GroupBroken("we have had enough");
    if (call->advance() != transport::Handshake::Step::done) return;
    (void)call->release();
    gone = true;
  };
  const auto exchange = [&](const std::string& mine) {
    const RankInfo info = decode_rank_info(mine);
    transport::HandshakeParams params{
        .context = context_of(info, request.name), .rank = 1, .expected = 0};
    params.agreed = digest_of({info, info});
    call.emplace(os::start_connect(os::abstract_unix_address(info.shm)),
                 transport::Handshake::Role::connector, request.key, std::move(params));
    return std::vector<std::string>{mine, mine};
  };
  const auto ending = ending_of([&] { (void)form_mesh(request, exchange, Deadline(60s)); });
  expect(gone, "the connection was not accepted");
  ending.check(ErrorKind::group_broken, {"had enough"});
});

// Threads: one has its channel before the other connects; no connection is closed.
const Test kAlone("waiting for a rank that never joins ends with the parent group", [] {
  ConnectOptions options = options_of_two(60s);
  options.transport = "local";
  ending_of([&] {
    (void)make_group(
        options, [](const std::string& mine) { return std::vector{mine, mine}; }, {0, 1},
        [](std::chrono::nanoseconds) { throw GroupBroken("we have had enough"); });
  }).check(ErrorKind::group_broken, {"had enough"});
});

// As by an all_gather, which breaks the parent: asking the parent again says less.
const Test kUnnoted("the error that ends the exchange of rank info is reported unchanged", [] {
  ending_of([&] {
    (void)make_group(
        options_of_two(60s),
        [](const std::string&) -> std::vector<std::string> {
          throw PeerLost("all_gather: rank 1 died", {.op = "all_gather", .peer = 1});
        },
        {}, [](std::chrono::nanoseconds) { throw GroupBroken("it cannot be used any more"); });
  }).check(ErrorKind::peer_lost, {"rank 1 died"}, 1);
});

// Rank 1 forms it too, but leaves without giving the reason.
const Test kLeft("a peer that leaves an established subgroup: the parent's end is the reason", [] {
  std::vector<std::string> texts(2);
  std::latch left{2};
  const auto exchange = [&](int rank, const std::string& mine) {
    texts[static_cast<size_t>(rank)] = mine;
    left.arrive_and_wait();
    return texts;
  };
  std::string same;
  ConnectOptions alone = options_of_two(60s);
  alone.size = 1;
  (void)make_group(alone,
                   [&](const std::string& mine) {
                     same = decode_rank_info(mine).options;
                     return std::vector<std::string>{mine};
                   },
                   {});
  run(2, [&](int rank) {
    if (rank == 1) {
      MeshRequest request = request_of(rank, "tcp");
      request.size = 2;
      request.name = alone.name;
      request.key = alone.secret;
      request.options = "size=2" + same.substr(std::string("size=1").size());
      Mesh mesh = form_mesh(
          request, [&](const std::string& mine) { return exchange(rank, mine); }, Deadline(60s));
      engine::EngineOptions options;
      options.rank = 1;
      options.names = {"rank 0", "rank 1"};
      const engine::Engine gone(std::move(mesh.channels), options);
      return;
    }
    ending_of([&] {
      (void)make_group(
          options_of_two(60s), [&](const std::string& mine) { return exchange(rank, mine); }, {},
          [](std::chrono::nanoseconds limit) {
            if (limit > 0s) throw GroupBroken("we have had enough");
          });
    }).check(ErrorKind::group_broken, {"had enough"});
  });
});

// As by Ctrl-C: while rank 2's connection is awaited, and while its info is.
const Test kInterrupted("an interrupt during forming ends it at once, and is reported", [] {
  for (const std::string by : {"shm", "tcp"}) {
    Notes infos;
    run(kSize - 1, [&](int rank) {
      MeshRequest request = request_of(rank, by);
      if (rank == 1) request.interrupted = [] { return true; };
      const auto ending = ending_of([&] {
        (void)form_mesh(
            request, [&](const std::string& mine) { return infos.exchange(rank, mine); },
            Deadline(rank == 0 ? 1s : 60s));
      });
      if (rank == 0) return;  // it may have connected before, or not
      ending.check(ErrorKind::group_broken, {"rank 1", "was interrupted"});
      expect(ending.seconds < 30, "it waited for its limit");
    });
  }
  rendezvous::LocalStore store;
  ConnectOptions options = options_of_two(60s);
  options.interrupted = [] { return true; };
  const auto ending = ending_of([&] { (void)connect(store, options); });
  ending.check(ErrorKind::group_broken, {"was interrupted"});
  expect(ending.seconds < 30, "it waited for its limit");
  expect(!store.find("world/rank_info/0"), "its info is still there");
});

const Test kOne("a group of one leaves no key in the store", [] {
  rendezvous::LocalStore store;
  ConnectOptions options = options_of_two(60s);
  options.size = 1;
  const auto group = connect(store, options);
  expect_equal(group->size(), 1, "size");
  for (const std::string key : {"world/formed/0", "world/rank_info/0"})
    expect(!store.find(key), key);
});

RankInfo sound_note() {
  RankInfo info = own_rank_info({});
  info.options = "reproducible=False";
  info.token = "abc";
  info.shm = "pycomm-1";
  info.tcp = "127.0.0.1:1 [::1]:2";
  info.memory = "4096";
  info.heap = "0";
  info.most_descriptors = "1024";
  info.descriptors = "512";
  info.tuned = {{"tcp", {16384, 1048576}}, {"shm", {8192, 1048576}}};
  return info;
}

const Test kRefused(
    "a rank with other options than a rank that left waits no longer than its limit", [] {
      rendezvous::LocalStore store;
      store.set("world/rank_info/1", encode(sound_note()));
      const auto ending = ending_of([&] { (void)connect(store, options_of_two(300ms)); });
      ending.check(ErrorKind::mismatch);
      expect(ending.seconds < 5, "it took " + std::to_string(ending.seconds) + " s");
    });

const Test kNote("rank info has one encoding, and no other text is accepted", [] {
  const std::string text = encode(sound_note());
  expect_equal(encode(decode_rank_info(text)), text, "valid rank info");
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.rfind(from), from.size(), to);
    expect(other != text, "no change:  " + from);
    expect_throws<InternalError>([&] { (void)decode_rank_info(other); });
  };
  const std::string pid = "\n" + std::to_string(sound_note().pid) + "\n";
  for (const std::string wrong :
       {"0", "-5", "+5", "007", " 5", "5 ", "5x", "", "99999999999999999999999"})
    refused(pid, "\n" + wrong + "\n");
  for (const std::string wrong : {"04096", "+4096", "-1", "x", ""})
    refused("\n4096\n", "\n" + wrong + "\n");
  refused("\n0\n", "\n00\n");
  for (const std::string wrong : {"01024", "+512", "x", ""})
    for (const std::string number : {"1024", "512"})
      refused("\n" + number + "\n", "\n" + wrong + "\n");
  refused("tcp 16384", "tcp  16384");
  refused("tcp 16384", " tcp 16384");
  refused("tcp 16384", "tcp +16384");
  refused("tcp 16384", "tcp 016384");
  refused("tcp 16384", "tcp -1");
  refused("shm 8192", "tcp 8192");  // twice
  refused("1048576\n", "1048576 \n");
  refused("1048576\n", "1048576\n\n");
  refused("1048576\n", "1048576\nx");
  refused("1048576\n", "1048576");
  refused("pycomm-7", "pycomm-6");
});

}  // namespace
