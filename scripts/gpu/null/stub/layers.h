// What the simulated GPU computes of cuDNN's other calls, whose arguments these are.
#pragma once
#include "dnn.h"

void norm_training(int mode, P alpha, P beta, D x, P x_, D y, P y_, D parameters, const float *gamma,
                   const float *bias, double factor, float *mean, float *var, double eps, float *saved_mean,
                   float *saved_inverse);
void norm_inference(int mode, P alpha, P beta, D x, P x_, D y, P y_, D parameters, const float *gamma,
                    const float *bias, const float *mean, const float *var, double eps);
void norm_backward(int mode, P alpha, P beta, P alpha_p, P beta_p, D x, P x_, D dy, P dy_, D dx, P dx_, D parameters,
                   const float *gamma, float *dgamma, float *dbias, double eps, const float *saved_mean,
                   const float *saved_inverse);
void activation_forward(D d, P alpha, D x, P x_, P beta, D y, P y_);
void activation_backward(D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_);
void pooling_forward(D d, P alpha, D x, P x_, P beta, D y, P y_);
void pooling_backward(D d, P alpha, D y, P y_, D dy, P dy_, D x, P x_, P beta, D dx, P dx_);
void softmax_forward(int algorithm, int mode, P alpha, D x, P x_, P beta, D y, P y_);
void softmax_backward(int algorithm, int mode, P alpha, D y, P y_, D dy, P dy_, P beta, D dx, P dx_);
void bias_backward(P alpha, D dy, P dy_, P beta, D db, P db_);
void add_tensor(P alpha, D a, P a_, P beta, D c, P c_);
void dropout_forward(D d, D x, P x_, D y, P y_, unsigned char *reserve);
void dropout_backward(D d, D dy, P dy_, D dx, P dx_, unsigned char *reserve);
// recurrent.c: a forward pass without a reserve space is inference; bytes of the reserve space.
size_t recurrent_reserve(D d, int steps, int batch);
void recurrent_forward(D d, D x, P x_, D hx, P hx_, D cx, P cx_, D w, P w_, D y, P y_, D hy, P hy_, D cy, P cy_,
                       P reserve);
void recurrent_backward(D d, D y, D dy, P dy_, D dhy, P dhy_, D dcy, P dcy_, D w, P w_, D hx, P hx_, D cx, P cx_, D dx,
                        P dx_, D dhx, P dhx_, D dcx, P dcx_, P reserve);
void recurrent_backward_weights(D d, D x, P x_, D hx, P hx_, D dw, P dw_, P reserve);
// spatial.c
void grid_forward(D d, P theta_, P grid_);
void grid_backward(D d, P dgrid_, P dtheta_);
void sampler_forward(D d, P alpha, D x, P x_, P grid_, P beta, D y, P y_);
void sampler_backward(D d, P alpha, D x, P x_, P beta, D dx, P dx_, P alpha_grid, D dy, P dy_, P grid_, P beta_grid,
                      P dgrid_);
