// An image in a vault made whole there, so that a file can take it from the device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "device.hpp"
#include "peer.hpp"

namespace zs {

using Extents = std::span<const std::pair<uint64_t, uint64_t>>;  // offsets in an image and sizes

// Brings to the image at `at` of the vault what of it only host memory has (`missing`, of what is at
// `image`), then has the device take the CRC-32C of `looked` there. Waits for both. On a stream of the least
// priority; any thread. Throws Kind::device where the device cannot look.
std::vector<uint32_t> complete(Device& device, const Vault& vault, uint64_t at, const std::byte* image,
                               Extents missing, Extents looked);

}  // namespace zs
