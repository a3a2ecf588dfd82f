// The frames of the store. The first byte of the input selects a request or a reply, the rest.
#include "fuzz.h"
#include "rendezvous/store_frame.h"

namespace {

using namespace pycomm::rendezvous::store_frame;

constexpr size_t kMostBytes = kRequestHeadBytes + kMaxKeyBytes + kMaxValueBytes;

template <typename Parser>
void check(std::string_view bytes, Parser parse) {
  const auto parsed = parse(bytes);
  fuzz::demand(parsed.needed <= kMostBytes, "a frame asks for more than its limits");
  switch (parsed.parse) {
    case Parse::broken:
      return;
    case Parse::more:
      return fuzz::demand(parsed.needed > bytes.size(), "a whole frame waits for more");
    case Parse::complete:
      break;
  }
  fuzz::demand(parsed.needed == bytes.size(), "bytes behind a frame were taken for it");
  fuzz::demand(encode(parsed.frame) == bytes, "a frame comes back as another");
  for (size_t n = 0; n < std::min<size_t>(bytes.size(), 64); ++n)
    fuzz::demand(parse(bytes.substr(0, n)).parse == Parse::more,
                 "a truncated frame is not recognised");
}

}  // namespace

void fuzz::one(Input input) {
  if (input.empty()) return;
  const std::string bytes = text_of(input.subspan(1));  // on its own, for the address sanitizer
  if (input[0] < std::byte{128}) return check(bytes, parse_request);
  check(bytes, parse_reply);
}
