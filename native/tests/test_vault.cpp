// Captures into another device's memory, and what drains it to host memory; played by the stand-in driver.
#include "../relay.hpp"
#include "../unload.hpp"
#include "training.hpp"

namespace {

using stand_in::delay, stand_in::reset;
using namespace training;

// To another device's memory first, and from there to where the rest of the image lies; every other time from
// the copy that a third vault has fetched.
void through_a_vault(uint64_t freeze_bytes, int us) {
  reset();
  zs::Pool pool("test", 2);
  const Opened first(0), second(1);
  State state(120, {&first}, true);
  const std::vector<zs::Training> trainings = {{first.device, new_stream(first)}};
  if (freeze_bytes != 0) first.device->vram()->reserve(freeze_bytes, kChunk);
  const Image image(state, &second);
  const zs::Vault vault(second.device->context(), 2 * state.plan->nbytes() + 4096);
  const zs::Vault mirror(first.device->context(), state.plan->nbytes());
  const std::vector<uint32_t> at_once = {0, 7, 50, 119};
  delay(us);
  for (int step = 1; step < 6; ++step) {
    const uint64_t place = step % 2 == 0 ? 0 : state.plan->nbytes() / 512 * 512 + 512;
    std::memset(image.data(), 0xEE, state.plan->nbytes());
    for (size_t k = 0; k < 120; ++k) state.write(k, step, trainings, k % 40 == 0 ? 2000 : 0);
    const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(),
                                            std::make_shared<const std::vector<uint32_t>>(at_once), -1,
                                            trainings, UINT64_MAX, false, {}, vault.at() + place);
    for (uint32_t k : at_once) state.write(k, 0xBB, trainings);
    capture->protect(freeze_bytes, trainings);
    for (size_t k = 0; k < 120; ++k) state.write(k, 0xCC, trainings);
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    const auto relay =
        zs::Relay::begin(pool, first.device, mirror, 0, vault.at() + place, capture->on_devices());
    if (step % 2 == 0) CHECK(relay->wait_for(std::nullopt));
    const auto unload = step % 2 == 0
                            ? zs::Unload::begin(pool, first.device, mirror, 0, image.data(),
                                                state.plan->nbytes(), kChunk, capture->on_devices())
                            : zs::Unload::begin(pool, second.device, vault, place, image.data(),
                                                state.plan->nbytes(), kChunk, capture->on_devices());
    CHECK(unload->wait_for(std::nullopt));
    unload->rethrow();
    const std::vector<std::byte> expected = state.image(step);
    CHECK(image.is(expected));
    CHECK(unload->checksums() == checksums_of(expected));
    CHECK(relay->wait_for(std::nullopt));
    relay->rethrow();
  }
  reset();
}

}  // namespace

int main() {
  through_a_vault(0, 0);
  through_a_vault(100 << 10, 100);
  return 0;
}
