// A libamdhip64 on which JAX's ROCm plugin starts: devices that are not there,
// whose memory is the host's and whose streams do everything at once. Graphs
// keep what is done to them. Launches go to a function of the test's. What the
// plugin links beside this is stubbed by plugin_stubs.py.

#include <elf.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidHandle = 400,
  kNotFound = 500,
  kPeerAccessAlreadyEnabled = 704,
  kLaunchFailure = 719,
  kNotSupported = 801,
};

constexpr char kArch[] = "gfx950:sramecc+:xnack-";
constexpr int kComputeUnits = 256;
constexpr int kLdsBytes = 160 << 10;
constexpr size_t kMemoryBytes = size_t{8} << 30;
constexpr int kVersion = 70000000;

using Dims = unsigned[3];
// What a launch needs of a kernel's metadata; see Runtime in plugin_runtime.py.
struct Layout {
  unsigned kernarg_size;  // without what the driver adds
  unsigned lds_bytes;
  unsigned registers;
  unsigned arguments;
  unsigned offsets[256];
  unsigned sizes[256];
};
using DescribeCallback = int (*)(const void* code, size_t code_size,
                                 const char* kernel, Layout* layout);
using LaunchCallback = int (*)(int device, const void* code, size_t code_size,
                               const char* kernel, const unsigned* grid,
                               const unsigned* block, const void* args,
                               size_t args_size, void* stream,
                               unsigned dynamic_lds, int from_graph);

struct Module {
  int device;
  std::vector<char> code;
  char* image;  // the code object's segments as they lie in memory
};

struct Function {
  const Module* module;
  std::string name;
  Layout layout;
};

// What a stream does with one call: returns an error.
using Work = std::function<int(void* stream)>;

struct Node {
  Work work;
};

struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
};

struct GraphExec {
  std::vector<std::pair<const Node*, Work>> steps;
};

struct Stream {
  int device;
  int priority;
  Graph* captured;
};

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Allocation {
  size_t size;
  int device;
  bool on_host;
};

std::mutex mutex;
int device_count = 2;
std::map<const char*, Allocation> allocations;
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Function>> functions;
std::atomic<DescribeCallback> describe_callback = nullptr;
std::atomic<LaunchCallback> launch_callback = nullptr;
thread_local int current_device = 0;
thread_local bool in_graph = false;

// Does `work`, or keeps it where the stream is being captured.
int Enqueue(void* stream, Work work) {
  auto* of = static_cast<Stream*>(stream);
  if (of == nullptr || of->captured == nullptr) return work(stream);
  of->captured->nodes.push_back(std::make_shared<Node>(Node{std::move(work)}));
  return kSuccess;
}

// The allocation that holds an address, or the end.
std::map<const char*, Allocation>::const_iterator Find(const void* address) {
  const char* byte = static_cast<const char*>(address);
  auto found = allocations.upper_bound(byte);
  if (found == allocations.begin()) return allocations.end();
  --found;
  return byte < found->first + found->second.size ? found : allocations.end();
}

int Allocate(void** address, size_t size, bool on_host) {
  *address = nullptr;
  if (size == 0) return kSuccess;
  void* memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  if (memory == nullptr) return kOutOfMemory;
  // NaN in every float type, and no zero that a kernel would be right to read.
  std::memset(memory, 0xFF, size);
  std::lock_guard<std::mutex> lock(mutex);
  allocations[static_cast<char*>(memory)] = {size, current_device, on_host};
  *address = memory;
  return kSuccess;
}

int Free(void* address) {
  if (address == nullptr) return kSuccess;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (allocations.erase(static_cast<char*>(address)) == 0) {
      return kInvalidValue;
    }
  }
  std::free(address);
  return kSuccess;
}

int Copy(void* to, const void* from, size_t size, void* stream) {
  return Enqueue(stream, [=](void*) {
    std::memmove(to, from, size);
    return kSuccess;
  });
}

int Fill(void* to, uint32_t value, size_t element_size, size_t count,
         void* stream) {
  return Enqueue(stream, [=](void*) {
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<char*>(to) + i * element_size, &value,
                  element_size);
    }
    return kSuccess;
  });
}

template <class T>
T Read(const void* code, size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(code) + offset, sizeof(value));
  return value;
}

// Bytes of an ELF file for AMD GPUs, 0 for anything else.
size_t CodeSize(const void* code) {
  const auto header = Read<Elf64_Ehdr>(code, 0);
  constexpr int kAmdGpu = 224;
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_machine != kAmdGpu) {
    return 0;
  }
  return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

int LoadImage(const void* code, char** image) {
  const auto header = Read<Elf64_Ehdr>(code, 0);
  std::vector<Elf64_Phdr> segments;
  size_t size = 0;
  for (int i = 0; i < header.e_phnum; ++i) {
    const auto segment =
        Read<Elf64_Phdr>(code, header.e_phoff + i * sizeof(Elf64_Phdr));
    if (segment.p_type != PT_LOAD) continue;
    segments.push_back(segment);
    size = std::max<size_t>(size, segment.p_vaddr + segment.p_memsz);
  }
  void* memory;
  if (int error = Allocate(&memory, size, false)) return error;
  std::memset(memory, 0, size);
  *image = static_cast<char*>(memory);
  for (const Elf64_Phdr& segment : segments) {
    std::memcpy(*image + segment.p_vaddr,
                static_cast<const char*>(code) + segment.p_offset,
                segment.p_filesz);
  }
  return kSuccess;
}

// The symbol of a code object's table of dynamic ones.
bool FindSymbol(const char* code, const char* name, Elf64_Sym* found) {
  const auto header = Read<Elf64_Ehdr>(code, 0);
  const auto section = [&](int i) {
    return Read<Elf64_Shdr>(code, header.e_shoff + i * sizeof(Elf64_Shdr));
  };
  for (int i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr table = section(i);
    if (table.sh_type != SHT_DYNSYM) continue;
    const char* names = code + section(table.sh_link).sh_offset;
    for (size_t at = 0; at < table.sh_size; at += sizeof(Elf64_Sym)) {
      *found = Read<Elf64_Sym>(code, table.sh_offset + at);
      if (std::strcmp(names + found->st_name, name) == 0) return true;
    }
  }
  return false;
}

// The launch as work, with its arguments' values of now.
int PackLaunch(void* handle, const Dims& grid, const Dims& block,
               unsigned dynamic_lds, void** params, void** extra, Work* work) {
  const auto* function = static_cast<const Function*>(handle);
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || block[i] == 0) return kInvalidConfiguration;
  }
  const Layout& layout = function->layout;
  std::vector<char> args;
  if (params != nullptr) {
    args.resize(layout.kernarg_size);
    for (unsigned i = 0; i < layout.arguments; ++i) {
      std::memcpy(args.data() + layout.offsets[i], params[i], layout.sizes[i]);
    }
  } else if (extra != nullptr && reinterpret_cast<intptr_t>(extra[0]) == 1 &&
             reinterpret_cast<intptr_t>(extra[2]) == 2) {
    const char* bytes = static_cast<const char*>(extra[1]);
    args.assign(bytes, bytes + *static_cast<const size_t*>(extra[3]));
  } else if (layout.arguments > 0) {
    return kInvalidValue;
  }
  const std::vector<unsigned> sizes = {grid[0],  grid[1],  grid[2],
                                       block[0], block[1], block[2]};
  const int device = function->module->device;
  *work = [=](void* stream) {
    const LaunchCallback callback = launch_callback;
    if (callback == nullptr) return int{kLaunchFailure};
    const std::vector<char>& code = function->module->code;
    return callback(device, code.data(), code.size(), function->name.c_str(),
                    sizes.data(), sizes.data() + 3, args.data(), args.size(),
                    stream, dynamic_lds, in_graph);
  };
  return kSuccess;
}

int AddNode(void** handle, void* graph, Work work) {
  auto node = std::make_shared<Node>(Node{std::move(work)});
  *handle = node.get();
  static_cast<Graph*>(graph)->nodes.push_back(std::move(node));
  return kSuccess;
}

int SetNode(void* exec, const void* node, Work work) {
  for (auto& [of, step] : static_cast<GraphExec*>(exec)->steps) {
    if (of == node) {
      step = std::move(work);
      return kSuccess;
    }
  }
  return kInvalidValue;
}

Work ChildWork(const void* graph) {
  const auto nodes = static_cast<const Graph*>(graph)->nodes;
  return [nodes](void* stream) {
    for (const auto& node : nodes) {
      if (int error = node->work(stream)) return error;
    }
    return int{kSuccess};
  };
}

// hipKernelNodeParams and hipMemsetParams.
struct KernelNodeParams {
  Dims block;
  void** extra;
  void* function;
  Dims grid;
  void** params;
  unsigned dynamic_lds;
};
static_assert(offsetof(KernelNodeParams, params) == 48);

struct MemsetParams {
  void* to;
  unsigned element_size;
  size_t height;
  size_t pitch;
  unsigned value;
  size_t width;
};
static_assert(sizeof(MemsetParams) == 48);

int KernelNodeWork(const KernelNodeParams* p, Work* work) {
  return PackLaunch(p->function, p->grid, p->block, p->dynamic_lds, p->params,
                    p->extra, work);
}

Work MemsetWork(const MemsetParams& p) {
  return [p](void*) {
    return Fill(p.to, p.value, p.element_size, p.width, nullptr);
  };
}

Work CopyWork(void* to, const void* from, size_t size) {
  return [=](void*) { return Copy(to, from, size, nullptr); };
}

int ListNodes(const void* graph, void** handles, size_t* count) {
  const auto& nodes = static_cast<const Graph*>(graph)->nodes;
  if (handles != nullptr) {
    *count = std::min(*count, nodes.size());
    for (size_t i = 0; i < *count; ++i) handles[i] = nodes[i].get();
  } else {
    *count = nodes.size();
  }
  return kSuccess;
}

// Numbers of hipDeviceAttribute_t; what is not here is 0.
int Attribute(int attribute) {
  switch (attribute) {
    case 5:  // clock rate in kHz
      return 2400000;
    case 19:  // L2 cache
      return 4 << 20;
    case 26:  // threads of a block along x, y and z, and in all
    case 27:
    case 28:
    case 56:
      return 1024;
    case 29:  // blocks along x
      return 0x7FFFFFFF;
    case 30:
    case 31:
      return 65535;
    case 57:  // threads of a compute unit
      return 2048;
    case 59:  // memory bus width
      return 8192;
    case 60:  // memory clock rate in kHz
      return 2000000;
    case 63:
      return kComputeUnits;
    case 71:  // registers of a block and of a compute unit
    case 72:
      return 131072;
    case 74:  // LDS of a block and of a compute unit
    case 75:
    case 76:
    case 10002:
      return kLdsBytes;
    case 87:  // lanes of a wave
      return 64;
    default:
      return 0;
  }
}

}  // namespace

// The test's side.

EXPORT void standin_set_callbacks(int devices, DescribeCallback describe,
                                  LaunchCallback launch) {
  device_count = devices;
  describe_callback = describe;
  launch_callback = launch;
}

// Up to `room` allocations; returns how many there are.
EXPORT size_t standin_allocations(uint64_t* addresses, uint64_t* sizes,
                                  size_t room) {
  std::lock_guard<std::mutex> lock(mutex);
  size_t i = 0;
  for (const auto& [address, allocation] : allocations) {
    if (i == room) break;
    addresses[i] = reinterpret_cast<uint64_t>(address);
    sizes[i++] = allocation.size;
  }
  return allocations.size();
}

// HIP's side: errors, the driver, devices.

EXPORT const char* hipGetErrorName(int error) {
  return error == kSuccess ? "hipSuccess" : "an error of the stand-in's";
}

EXPORT const char* hipGetErrorString(int error) {
  return hipGetErrorName(error);
}

EXPORT int hipGetLastError() { return kSuccess; }
EXPORT int hipInit(unsigned) { return kSuccess; }

EXPORT int hipDriverGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

EXPORT int hipRuntimeGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

EXPORT int hipGetDeviceCount(int* count) {
  *count = device_count;
  return kSuccess;
}

EXPORT int hipDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int hipGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}

EXPORT int hipSetDevice(int device) {
  if (device < 0 || device >= device_count) return kInvalidDevice;
  current_device = device;
  return kSuccess;
}

EXPORT int hipDeviceSynchronize() { return kSuccess; }

EXPORT int hipDeviceGetName(char* name, int room, int) {
  std::strncpy(name, "stand-in MI355X", room);
  return kSuccess;
}

EXPORT int hipDeviceGetPCIBusId(char* id, int room, int device) {
  const std::string text = "0000:0" + std::to_string(device) + ":00.0";
  std::strncpy(id, text.c_str(), room);
  return kSuccess;
}

EXPORT int hipDeviceGetAttribute(int* value, int attribute, int) {
  *value = Attribute(attribute);
  return kSuccess;
}

// hipDeviceProp_tR0600, of 1472 bytes.
EXPORT int hipGetDevicePropertiesR0600(void* properties, int device) {
  if (device < 0 || device >= device_count) return kInvalidDevice;
  char* bytes = static_cast<char*>(properties);
  std::memset(bytes, 0, 1472);
  const auto put = [bytes](size_t offset, auto value) {
    std::memcpy(bytes + offset, &value, sizeof(value));
  };
  std::strcpy(bytes, "stand-in MI355X");
  put(288, kMemoryBytes);
  put(296, size_t{kLdsBytes});
  put(304, Attribute(71));
  put(308, Attribute(87));
  for (size_t offset : {320, 324, 328, 332}) put(offset, Attribute(56));
  for (int i = 0; i < 3; ++i) put(336 + 4 * i, Attribute(29 + i));
  put(348, Attribute(5));
  put(360, 9);
  put(364, 5);
  put(388, kComputeUnits);
  put(608, Attribute(60));
  put(612, Attribute(59));
  put(616, Attribute(19));
  put(624, Attribute(57));
  put(640, size_t{kLdsBytes});
  put(648, Attribute(72));
  std::strcpy(bytes + 1160, kArch);
  put(1416, size_t{kLdsBytes});
  return kSuccess;
}

EXPORT int hipDeviceTotalMem(size_t* bytes, int) {
  *bytes = kMemoryBytes;
  return kSuccess;
}

EXPORT int hipMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kMemoryBytes;
  return kSuccess;
}

EXPORT int hipDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return kSuccess;
}

EXPORT int hipDeviceEnablePeerAccess(int, unsigned) {
  return kPeerAccessAlreadyEnabled;
}

EXPORT int hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return kSuccess;
}

// Memory.

EXPORT int hipMalloc(void** address, size_t size) {
  return Allocate(address, size, false);
}

EXPORT int hipExtMallocWithFlags(void** address, size_t size, unsigned) {
  return Allocate(address, size, false);
}

EXPORT int hipMallocManaged(void** address, size_t size, unsigned) {
  return Allocate(address, size, false);
}

EXPORT int hipHostMalloc(void** address, size_t size, unsigned) {
  return Allocate(address, size, true);
}

EXPORT int hipFree(void* address) { return Free(address); }
EXPORT int hipHostFree(void* address) { return Free(address); }
EXPORT int hipHostRegister(void*, size_t, unsigned) { return kSuccess; }
EXPORT int hipHostUnregister(void*) { return kSuccess; }

EXPORT int hipHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return kSuccess;
}

EXPORT int hipMemGetAddressRange(void** base, size_t* size, void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = Find(address);
  if (found == allocations.end()) return kNotFound;
  *base = const_cast<char*>(found->first);
  *size = found->second.size;
  return kSuccess;
}

EXPORT int hipPointerGetAttribute(void* value, int attribute, void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = Find(address);
  if (found == allocations.end()) return kInvalidValue;
  const auto& [base, allocation] = *found;
  switch (attribute) {
    case 2:  // memory type: the host's or the device's
      *static_cast<unsigned*>(value) = allocation.on_host ? 1 : 2;
      return kSuccess;
    case 3:  // where the device sees it, and the host
    case 4:
      *static_cast<void**>(value) = address;
      return kSuccess;
    case 9:
      *static_cast<int*>(value) = allocation.device;
      return kSuccess;
    case 11:
      *static_cast<const void**>(value) = base;
      return kSuccess;
    case 12:
      *static_cast<size_t*>(value) = allocation.size;
      return kSuccess;
    default:
      return kNotSupported;
  }
}

EXPORT int hipDrvPointerGetAttributes(unsigned count, const int* attributes,
                                      void** values, void* address) {
  for (unsigned i = 0; i < count; ++i) {
    const int error = hipPointerGetAttribute(values[i], attributes[i], address);
    if (error) return error;
  }
  return kSuccess;
}

struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned flags;
};

EXPORT int hipPointerGetAttributes(PointerAttributes* attributes,
                                   void* address) {
  *attributes = {};
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = Find(address);
  if (found == allocations.end()) return kSuccess;
  const Allocation& allocation = found->second;
  *attributes = {
      allocation.on_host ? 1 : 2, allocation.device, address, address, 0, 0};
  return kSuccess;
}

EXPORT int hipMemcpy(void* to, const void* from, size_t size, int) {
  return Copy(to, from, size, nullptr);
}

EXPORT int hipMemcpyDtoH(void* to, void* from, size_t size) {
  return Copy(to, from, size, nullptr);
}

EXPORT int hipMemcpyHtoD(void* to, void* from, size_t size) {
  return Copy(to, from, size, nullptr);
}

EXPORT int hipMemcpyAsync(void* to, const void* from, size_t size, int,
                          void* stream) {
  return Copy(to, from, size, stream);
}

EXPORT int hipMemcpyWithStream(void* to, const void* from, size_t size, int,
                               void* stream) {
  return Copy(to, from, size, stream);
}

EXPORT int hipMemcpyDtoDAsync(void* to, void* from, size_t size, void* stream) {
  return Copy(to, from, size, stream);
}

EXPORT int hipMemcpyDtoHAsync(void* to, void* from, size_t size, void* stream) {
  return Copy(to, from, size, stream);
}

EXPORT int hipMemcpyHtoDAsync(void* to, void* from, size_t size, void* stream) {
  return Copy(to, from, size, stream);
}

EXPORT int hipMemset(void* to, int value, size_t size) {
  return Fill(to, value, 1, size, nullptr);
}

EXPORT int hipMemsetAsync(void* to, int value, size_t size, void* stream) {
  return Fill(to, value, 1, size, stream);
}

EXPORT int hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  return Fill(to, value, 4, count, stream);
}

// Streams and events.

EXPORT int hipStreamCreateWithPriority(void** stream, unsigned, int priority) {
  *stream = new Stream{current_device, priority, nullptr};
  return kSuccess;
}

EXPORT int hipStreamCreateWithFlags(void** stream, unsigned flags) {
  return hipStreamCreateWithPriority(stream, flags, 0);
}

EXPORT int hipStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return kSuccess;
}

EXPORT int hipStreamGetDevice(void* stream, int* device) {
  *device = stream == nullptr ? current_device
                              : static_cast<const Stream*>(stream)->device;
  return kSuccess;
}

EXPORT int hipGetStreamDeviceId(void* stream) {
  int device;
  hipStreamGetDevice(stream, &device);
  return device;
}

EXPORT int hipStreamGetFlags(void*, unsigned* flags) {
  *flags = 0;
  return kSuccess;
}

EXPORT int hipStreamGetPriority(void* stream, int* priority) {
  *priority = static_cast<const Stream*>(stream)->priority;
  return kSuccess;
}

EXPORT int hipStreamQuery(void*) { return kSuccess; }
EXPORT int hipStreamSynchronize(void*) { return kSuccess; }
EXPORT int hipStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }

EXPORT int hipStreamWriteValue64(void* stream, void* to, uint64_t value,
                                 unsigned) {
  return Enqueue(stream, [=](void*) {
    std::memcpy(to, &value, sizeof(value));
    return kSuccess;
  });
}

EXPORT int hipLaunchHostFunc(void* stream, void (*call)(void*), void* data) {
  return Enqueue(stream, [=](void*) {
    call(data);
    return kSuccess;
  });
}

EXPORT int hipEventCreateWithFlags(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}

EXPORT int hipEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}

EXPORT int hipEventRecord(void* event, void*) {
  static_cast<Event*>(event)->time = std::chrono::steady_clock::now();
  return kSuccess;
}

EXPORT int hipEventQuery(void*) { return kSuccess; }
EXPORT int hipEventSynchronize(void*) { return kSuccess; }

EXPORT int hipEventElapsedTime(float* milliseconds, void* start, void* stop) {
  const std::chrono::duration<float, std::milli> elapsed =
      static_cast<Event*>(stop)->time - static_cast<Event*>(start)->time;
  *milliseconds = elapsed.count();
  return kSuccess;
}

// Modules and launches.

EXPORT int hipModuleLoadData(void** module, const void* code) {
  const size_t size = CodeSize(code);
  if (size == 0) return kInvalidImage;
  char* image = nullptr;
  if (int error = LoadImage(code, &image)) return error;
  const char* bytes = static_cast<const char*>(code);
  std::lock_guard<std::mutex> lock(mutex);
  modules.push_back(std::make_unique<Module>(
      Module{current_device, std::vector<char>(bytes, bytes + size), image}));
  *module = modules.back().get();
  return kSuccess;
}

EXPORT int hipModuleUnload(void*) { return kSuccess; }

EXPORT int hipModuleGetGlobal(void** address, size_t* size, void* handle,
                              const char* name) {
  const auto* module = static_cast<const Module*>(handle);
  Elf64_Sym symbol;
  if (!FindSymbol(module->code.data(), name, &symbol)) return kNotFound;
  if (address != nullptr) *address = module->image + symbol.st_value;
  if (size != nullptr) *size = symbol.st_size;
  return kSuccess;
}

EXPORT int hipModuleGetFunction(void** function, void* handle,
                                const char* name) {
  const auto* module = static_cast<const Module*>(handle);
  if (module->device != current_device) return kInvalidHandle;
  auto found = std::make_unique<Function>(Function{module, name, {}});
  const DescribeCallback describe = describe_callback;
  if (describe == nullptr || describe(module->code.data(), module->code.size(),
                                      name, &found->layout)) {
    return kNotFound;
  }
  std::lock_guard<std::mutex> lock(mutex);
  functions.push_back(std::move(found));
  *function = functions.back().get();
  return kSuccess;
}

EXPORT int hipFuncGetAttribute(int* value, int attribute, void* function) {
  const Layout& layout = static_cast<const Function*>(function)->layout;
  *value = attribute == 1   ? layout.lds_bytes
           : attribute == 4 ? layout.registers
                            : 0;
  return kSuccess;
}

EXPORT int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                              void*, int,
                                                              size_t) {
  *blocks = 1;
  return kSuccess;
}

EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x,
                                 unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned dynamic_lds,
                                 void* stream, void** params, void** extra) {
  const Dims grid = {grid_x, grid_y, grid_z};
  const Dims block = {block_x, block_y, block_z};
  Work work;
  if (int error = PackLaunch(function, grid, block, dynamic_lds, params, extra,
                             &work)) {
    return error;
  }
  return Enqueue(stream, std::move(work));
}

// The plugin's own kernels are registered when it is loaded, never launched.

EXPORT void** __hipRegisterFatBinary(const void*) {
  static void* binary;
  return &binary;
}

EXPORT void __hipRegisterFunction() {}
EXPORT void __hipRegisterVar() {}
EXPORT void __hipUnregisterFatBinary(void**) {}

// Graphs.

EXPORT int hipGraphCreate(void** graph, unsigned) {
  *graph = new Graph;
  return kSuccess;
}

EXPORT int hipGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}

EXPORT int hipGraphGetNodes(void* graph, void** nodes, size_t* count) {
  return ListNodes(graph, nodes, count);
}

EXPORT int hipGraphGetRootNodes(void* graph, void** nodes, size_t* count) {
  return ListNodes(graph, nodes, count);
}

EXPORT int hipGraphAddEmptyNode(void** node, void* graph, const void*, size_t) {
  return AddNode(node, graph, [](void*) { return int{kSuccess}; });
}

EXPORT int hipGraphAddKernelNode(void** node, void* graph, const void*, size_t,
                                 const KernelNodeParams* params) {
  Work work;
  const int error = KernelNodeWork(params, &work);
  return error ? error : AddNode(node, graph, std::move(work));
}

EXPORT int hipGraphAddMemsetNode(void** node, void* graph, const void*, size_t,
                                 const MemsetParams* params) {
  return AddNode(node, graph, MemsetWork(*params));
}

EXPORT int hipGraphAddMemcpyNode1D(void** node, void* graph, const void*,
                                   size_t, void* to, const void* from,
                                   size_t size, int) {
  return AddNode(node, graph, CopyWork(to, from, size));
}

EXPORT int hipGraphAddChildGraphNode(void** node, void* graph, const void*,
                                     size_t, void* child) {
  return AddNode(node, graph, ChildWork(child));
}

EXPORT int hipGraphInstantiate(void** exec, void* graph, void**, char*,
                               size_t) {
  auto made = std::make_unique<GraphExec>();
  for (const auto& node : static_cast<Graph*>(graph)->nodes) {
    made->steps.emplace_back(node.get(), node->work);
  }
  *exec = made.release();
  return kSuccess;
}

EXPORT int hipGraphExecDestroy(void* exec) {
  delete static_cast<GraphExec*>(exec);
  return kSuccess;
}

EXPORT int hipGraphExecKernelNodeSetParams(void* exec, void* node,
                                           const KernelNodeParams* params) {
  Work work;
  const int error = KernelNodeWork(params, &work);
  return error ? error : SetNode(exec, node, std::move(work));
}

EXPORT int hipGraphExecMemsetNodeSetParams(void* exec, void* node,
                                           const MemsetParams* params) {
  return SetNode(exec, node, MemsetWork(*params));
}

EXPORT int hipGraphExecMemcpyNodeSetParams1D(void* exec, void* node, void* to,
                                             const void* from, size_t size,
                                             int) {
  return SetNode(exec, node, CopyWork(to, from, size));
}

EXPORT int hipGraphExecChildGraphNodeSetParams(void* exec, void* node,
                                               void* child) {
  return SetNode(exec, node, ChildWork(child));
}

EXPORT int hipGraphLaunch(void* exec, void* stream) {
  return Enqueue(stream, [exec](void* stream) {
    in_graph = true;
    int error = kSuccess;
    for (const auto& step : static_cast<GraphExec*>(exec)->steps) {
      if (!error) error = step.second(stream);
    }
    in_graph = false;
    return error;
  });
}

EXPORT int hipStreamBeginCapture(void* stream, int) {
  static_cast<Stream*>(stream)->captured = new Graph;
  return kSuccess;
}

EXPORT int hipStreamEndCapture(void* stream, void** graph) {
  *graph = std::exchange(static_cast<Stream*>(stream)->captured, nullptr);
  return kSuccess;
}

EXPORT int hipStreamGetCaptureInfo(void* stream, int* status,
                                   unsigned long long* id) {
  const auto* of = static_cast<const Stream*>(stream);
  *status = of != nullptr && of->captured != nullptr;
  if (id != nullptr) *id = 1;
  return kSuccess;
}
