// XLA's side of its foreign function interface, for tests of the handlers that
// only a GPU's platform has: asks for their traits and calls their stages.

#include <cstdint>
#include <string>

#include "xla/ffi/api/c_api.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct XLA_FFI_Error {
  int code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  void* stream;
};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}

void GetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr,
                        XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.XLA_FFI_Error_GetMessage = GetMessage;
    made.XLA_FFI_Error_Destroy = DestroyError;
    made.XLA_FFI_Stream_Get = GetStream;
    return made;
  }();
  return &api;
}

XLA_FFI_CallFrame Frame(XLA_FFI_ExecutionStage stage,
                        XLA_FFI_ExecutionContext* context) {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = context;
  frame.stage = stage;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

// 0, or the error's code and its message in `message`.
int Take(XLA_FFI_Error* error, char* message, size_t size) {
  if (error == nullptr) return 0;
  const int code = error->code;
  message[error->message.copy(message, size - 1)] = '\0';
  delete error;
  return code;
}

}  // namespace

EXPORT int xla_traits(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {
      {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
       nullptr},
      &metadata};
  XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_EXECUTE, nullptr);
  frame.extension_start = &extension.extension_base;
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return static_cast<int>(metadata.traits);
  delete error;
  return -1;
}

EXPORT int xla_initialize(XLA_FFI_Handler* handler, void* stream, char* message,
                          size_t size) {
  XLA_FFI_ExecutionContext context = {stream};
  XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_INITIALIZE, &context);
  return Take(handler(&frame), message, size);
}

struct Array {
  int32_t dtype;  // XLA's code
  int32_t rank;
  int64_t dims[4];
  void* data;
};

// The attention call: nine operands and the results, and the attributes in the
// order of their names, int64 but for quadratic.
EXPORT int xla_execute(XLA_FFI_Handler* handler, void* stream, Array* arrays,
                       int32_t count, int64_t kv_block, int64_t q_block,
                       bool quadratic, int64_t window_left,
                       int64_t window_right, char* message, size_t size) {
  XLA_FFI_ExecutionContext context = {stream};
  XLA_FFI_CallFrame frame = Frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
  constexpr int kOperands = 9;
  constexpr int kMaxResults = 3;
  const int results = count - kOperands;
  XLA_FFI_Buffer buffers[kOperands + kMaxResults];
  void* pointers[kOperands + kMaxResults];
  XLA_FFI_ArgType arg_types[kOperands];
  XLA_FFI_RetType ret_types[kMaxResults];
  for (int i = 0; i < count; ++i) {
    buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE,
                  nullptr,
                  static_cast<XLA_FFI_DataType>(arrays[i].dtype),
                  arrays[i].data,
                  arrays[i].rank,
                  arrays[i].dims};
    pointers[i] = &buffers[i];
  }
  for (auto& type : arg_types) type = XLA_FFI_ArgType_BUFFER;
  for (auto& type : ret_types) type = XLA_FFI_RetType_BUFFER;
  frame.args.size = kOperands;
  frame.args.types = arg_types;
  frame.args.args = pointers;
  frame.rets.size = results;
  frame.rets.types = ret_types;
  frame.rets.rets = pointers + kOperands;

  XLA_FFI_ByteSpan names[] = {{"kv_block", 8},
                              {"q_block", 7},
                              {"quadratic", 9},
                              {"window_left", 11},
                              {"window_right", 12}};
  XLA_FFI_Scalar scalars[] = {{XLA_FFI_DataType_S64, &kv_block},
                              {XLA_FFI_DataType_S64, &q_block},
                              {XLA_FFI_DataType_PRED, &quadratic},
                              {XLA_FFI_DataType_S64, &window_left},
                              {XLA_FFI_DataType_S64, &window_right}};
  XLA_FFI_ByteSpan* name_pointers[5];
  void* scalar_pointers[5];
  XLA_FFI_AttrType attr_types[5];
  for (int i = 0; i < 5; ++i) {
    name_pointers[i] = &names[i];
    scalar_pointers[i] = &scalars[i];
    attr_types[i] = XLA_FFI_AttrType_SCALAR;
  }
  frame.attrs.size = 5;
  frame.attrs.types = attr_types;
  frame.attrs.names = name_pointers;
  frame.attrs.attrs = scalar_pointers;
  return Take(handler(&frame), message, size);
}
